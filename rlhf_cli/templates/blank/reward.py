"""A reward function to start from. In ppo.yaml its path begins where rlhf is called: `DIR/reward.py:brevity`."""


def brevity(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:  # noqa: ARG001
    """One number per response: 0 for an empty one, down to -1 for 200 characters and more.

    `rows` are the rows of the prompts with all of their columns. docs/rewards.md explains the details.
    """
    return [-min(len(response), 200) / 200 for response in responses]
