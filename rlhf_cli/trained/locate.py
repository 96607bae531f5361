"""Which stage of which run a directory is. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError
from rlhf_cli.program import command, from_here
from rlhf_cli.run.artifacts import ADAPTER_CONFIG, read_manifest, stage_directory
from rlhf_cli.run.checkpoint_files import MEMBERS

MODEL = "model"


@dataclass(frozen=True)
class StageModel:
    root: Path
    stage: str
    folder: str = MODEL
    """The model's folder in the stage's directory. Others are best_model, ema_model, value_model, members/1."""

    @property
    def path(self) -> str:
        return str(stage_directory(self.root, self.stage) / self.folder)

    @property
    def name(self) -> str:
        """The stage, and the folder if it is not `model`."""
        return self.stage if self.folder == MODEL else f"{self.stage}/{self.folder}"

    @property
    def title(self) -> str:
        """Run and stage."""
        return f"{self.root.resolve().name}-{self.name}".replace("/", "-")


def is_model(path: Path) -> bool:
    """Whether a directory has a model, adapters or a GGUF file."""
    return any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)) or any(path.glob("*.gguf"))


def locate(
    directory: str | Path, stage: str | None = None, default: Sequence[str] = ("ppo", "sft")
) -> StageModel | None:
    """The model that a run, one of its stages, or a model of a stage stands for; None for a model outside of any run,
    and for a hub id.

    `stage` is used instead of the directory's own; for a run without it, the first finished one of `default`. Raises
    ArtifactError if that stage is not finished, or none of `default` is.
    """
    path = Path(directory)
    if not path.is_dir():
        return None
    root, whole = path, path.resolve()
    places = [(whole, MODEL), (whole.parent, whole.name)]
    if whole.parent.name == MEMBERS:
        places.append((whole.parent.parent, f"{MEMBERS}/{whole.name}"))
    for folder, name in places:
        manifest = read_manifest(folder)
        if manifest is None or manifest.stage != folder.name or (folder != whole and not is_model(whole)):
            continue
        root = Path(from_here(folder.parent))
        if stage is None or stage == folder.name:
            return StageModel(root, folder.name, name)
        break
    else:
        if is_model(path):
            return None
    finished = (name for name in default if read_manifest(stage_directory(root, name)) is not None)
    stage = stage or next(finished, default[-1])
    finished_stages(root, stage)
    return StageModel(root, stage)


def finished_stages(root: Path, wanted: str | None = None) -> list[str]:
    """The finished stages of a run. Raises ArtifactError if there is none, or `wanted` is not one."""
    finished = [stage for stage in STAGES if read_manifest(stage_directory(root, stage)) is not None]
    if not finished or wanted not in (None, *finished):
        what = f"stage {wanted} is not finished" if finished else "no stage is finished"
        raise ArtifactError(f"{root}: {what}. `{command('status', str(root))}` shows what is there")
    return finished
