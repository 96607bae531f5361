"""`rlhf pipeline --rounds N`: labels of the policy's replies, a new reward model, and PPO again from the SFT model."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from rlhf_cli.commands.label import Labelling, pairs_of
from rlhf_cli.commands.output import Dropped, Output, data_digest
from rlhf_cli.commands.rounds import _pair
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.records import Record
from rlhf_cli.run.artifacts import digest_file, read_manifest
from rlhf_cli.trained.model import RewardSet
from support.projects import rlhf
from support.tiny import read_jsonl, write_jsonl

LABELS = """
from pathlib import Path
CALLS = Path(__file__).with_name("calls")

def longest_word(prompts, responses, rows):
    calls = int(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text(str(calls + 1))
    if calls == STOP:
        raise KeyboardInterrupt
    return [sum(map(ord, response)) % 1000 for response in responses]
"""


def rounds(project, *arguments, exit_code=0):
    return rlhf("pipeline", project, "--rounds", 3, "--pairs", 12, *arguments, code=exit_code).output


def with_labels(project, stop=-1):
    (project / "labels.py").write_text(LABELS.replace("STOP", str(stop)), encoding="utf-8")
    return "--labels", f"{project}/labels.py:longest_word"


def label(samples, out, keys):
    """As `rlhf label` does it."""
    source = DataSource(path=str(samples))
    with Output(out, {"data": data_digest(source), "seed": 0, "labeller": None}) as output:
        labelling = Labelling(pairs_of(source, "error")[0], output, 0, None)
        assert all(labelling.take(key) for key in keys)


def outcome(run):
    """The digests of labels and weights of all rounds."""
    return {str(p.relative_to(run)): digest_file(p) for p in run.rglob("*") if p.suffix in (".safetensors", ".jsonl")
            and p.name in ("labels.jsonl", "model.safetensors") and "sft" not in p.parts}  # fmt: skip


@pytest.fixture(scope="module")
def three(finished, tmp_path_factory):
    """A project with three rounds."""
    folder = tmp_path_factory.mktemp("rounds") / "p"
    shutil.copytree(finished, folder)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace(str(finished), str(folder)), encoding="utf-8")
    rounds(folder, *with_labels(folder))
    return folder


def test_each_round_adds_its_labels_and_starts_from_the_sft_model(three):
    prompts = []
    for number in (2, 3):
        run = three / "run/rounds" / str(number)
        rows = read_jsonl(run / "labels.jsonl")
        assert 6 < len(rows) <= 12
        for row in rows:
            better, worse = (sum(map(ord, row[name])) % 1000 for name in ("chosen", "rejected"))
            assert (row["chosen_score"], row["rejected_score"]) == (better, worse)
            assert better > worse
        prompts.append({row["prompt"] for row in rows})
        trained = yaml.safe_load((run / "rm/config.yaml").read_text(encoding="utf-8"))["data"]["train"]
        pooled = [three / "run/rounds" / str(one) / "labels.jsonl" for one in range(2, number + 1)]
        assert [Path(source["path"]) for source in trained] == [three / "pref.jsonl", *pooled]
        first, again = (read_manifest(folder / "ppo").identity["inputs"] for folder in (three / "run", run))
        assert again["policy"] == first["policy"]
        assert [again[key] != first[key] for key in again if key.startswith("rewards")] == [True]
    assert not prompts[0] & prompts[1]


def test_a_second_call_does_nothing(three):
    before = outcome(three / "run")
    assert len(before) == 2 + 3 * 3, "labels, reward models, policies and value models"
    output = rounds(three, *with_labels(three))
    assert output.count("skipped, ") == 7
    assert outcome(three / "run") == before
    table = output[output.index("reward model's accuracy") :].splitlines()
    assert [line.split()[0] for line in table[2:5]] == ["1", "2", "3"]


@pytest.fixture
def own_interrupts():
    """Python's own handler of Ctrl-C, whatever an earlier test has left: without it an interrupt counts as an error."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_interrupts")
def test_an_interrupted_round_resumes_and_prints_the_notes_of_its_labels(three, project, monkeypatch):
    load = RewardSet.load
    monkeypatch.setattr(RewardSet, "load", lambda *given: (load(*given)[0], ["sent unencrypted"]))
    # The labels of a round take two calls, one for each reply; the second call of round 3 is interrupted.
    shutil.rmtree(project / "run")
    shutil.copytree(three / "run", project / "run", symlinks=True, ignore=lambda _, names: {"rounds"} & set(names))
    output = rounds(project, *with_labels(project, stop=3), exit_code=130)
    assert "Run the same command to resume" in output
    assert output.count("pipeline: sent unencrypted") == 2, "once for each round"
    assert (project / "run/rounds/2/ppo/manifest.json").is_file()
    assert not (project / "run/rounds/3/rm").exists()
    done = digest_file(project / "run/rounds/2/ppo/model/model.safetensors")
    rounds(project, *with_labels(project))
    assert digest_file(project / "run/rounds/2/ppo/model/model.safetensors") == done
    assert outcome(project / "run") == outcome(three / "run")


def test_labels_by_hand(project):
    run = project / "run/rounds/2"
    assert "round 2 waits for" in rounds(project)
    samples = read_jsonl(run / "samples.jsonl")
    assert all(len(row["responses"]) == 2 and row["scores"] == [None, None] for row in samples)
    for keys, waits in (("1", "round 2 waits for"), ("2" * (len(samples) - 1), "round 3 waits for")):
        label(run / "samples.jsonl", run / "labels.jsonl", keys)
        assert waits in rounds(project)
    row = json.loads((run / "samples.jsonl.settings").read_text(encoding="utf-8"))
    assert row["labels"] is None
    write_jsonl(run / "samples.jsonl", samples[:-1])
    assert "has labels of other pairs" in rounds(project, exit_code=2)
    (run / "labels.jsonl.settings").write_text('{"data": ', encoding="utf-8")
    assert "labels.jsonl.settings: is not a JSON object. Remove it and" in rounds(project, exit_code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "no rounds": (["--rounds", "1", "--labels", "a.py:b"], "--labels: does nothing without --rounds"),
        "no pairs": (["--rounds", "1"], "--pairs: does nothing without --rounds"),
        "no file": (["--labels", "no.py:judge"], "no.py: no such file"),
        "no function": (["--labels", "{project}/labels.py:other"], "labels.py has no function other"),
        "no source": (["--labels", "nonsense"], "--labels: labels: found the text 'nonsense', must be a mapping"),
        "its own": (["--labels", "{{type: reward_model}}"], "the run's own would repeat its mistakes"),
        "a typing error": (["--labels", "{{type: length, targt: 3}}"], "did you mean target?"),
        "no reward model": (["--set", "ppo:rewards=[{{type: length, target: 3}}]"], "so labels would change nothing"),
        "no pairs of answers": (["--set", "rm:loss=mse"], "labels are pairs, and rm.yaml has loss: mse"),
        "shares": (["--set", "rm:data.split=[1, 1, 1]"], "data.split of rm.yaml would leave out the labels"),
    }.values(),
)
def test_bad_input(arguments, message, project):
    with_labels(project)
    before = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    output = rounds(project, *(word.format(project=project) for word in arguments), exit_code=2)
    assert message in " ".join(output.split())
    after = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    assert after == before, "nothing was trained"


def test_replies_without_a_better_one_are_dropped():
    reply = {"response": " a", "ended": True, "score": 1.0}
    for text, reason in (("a ", "the replies are equal"), (" ", "a reply is blank")):
        assert _pair(Record("p", "row"), reply, reply | {"response": text, "score": 2.0}) == Dropped(reason)
    assert _pair(Record("p", "row"), reply, reply | {"response": "b"}) == Dropped("tie")


def test_other_labels_are_not_replaced(three):
    labels = (three / "run/rounds/2/labels.jsonl").read_bytes()
    output = rounds(three, "--labels", "{type: length, target: 3}", exit_code=2)
    assert "labels.jsonl: was made with other settings: labels. Restore them, or remove the file" in output
    assert (three / "run/rounds/2/labels.jsonl").read_bytes() == labels
