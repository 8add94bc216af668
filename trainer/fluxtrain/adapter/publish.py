"""Publishes the LoRA of a run at the Hugging Face Hub, with its samples and a model card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from fluxtrain import __version__
from fluxtrain.adapter.file import read_adapter, readers
from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import ADAPTERS_FOLDER, CONFIG_FILE, SAMPLES_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import CONDITIONS, ModelConfig
from fluxtrain.errors import UNSET, ConfigError, DataError, one_line
from fluxtrain.fetch.http import DownloadError
from fluxtrain.state.run_state import read_config

CARD_FILE = "README.md"
_MOST_IMAGES = 12
_IMAGES = "images"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PUBLISHER = "black-forest-labs"
_OPEN = "FLUX.1-schnell"
_SIZES = ("hidden_size", "depth", "depth_single_blocks", "vec_in_dim", "context_in_dim")
_DEV = "FLUX.1-dev"
_OTHERS = {
    **{name: each.repository for name, each in CONDITIONS.items() if each.adds_tokens},
    "krea": "FLUX.1-Krea-dev",
}
"""Bases with dev's inputs, by a word in the names of their files."""


@dataclass(frozen=True)
class Publication:
    """What is published of a run."""

    config: RunConfig
    lora: Path
    step: int | None
    """That of the samples."""
    images: Sequence[tuple[Path, str]]
    """The samples of the newest step with their prompts."""
    readers: str
    """The programs that load the file."""

    @staticmethod
    def of(run: Path) -> Publication:
        """Return what the folder ``run`` has.

        Raises ConfigError or DataError if it is no run, or has no LoRA.
        """
        if not (run / CONFIG_FILE).is_file():
            text = f"has no {CONFIG_FILE}; give the output folder of a run, such as runs/NAME"
            raise ConfigError("RUN", str(run), text)
        config = validate(RunConfig, read_config(run), str(run / CONFIG_FILE))
        if config.adapter is None:
            text = "trains all weights and no LoRA; `fluxtrain adapter extract` makes one of two models"
            raise ConfigError("RUN", str(run), text)
        folder, name = run / ADAPTERS_FOLDER, config.adapter_file.name
        last = folder / f"{name}.safetensors"
        found = [last] if last.is_file() else sorted(folder.glob(f"{name}-*.safetensors"))
        if not found:
            text = f"has no {ADAPTERS_FOLDER}/{last.name} yet; `fluxtrain adapter convert RUN` writes one"
            raise ConfigError("RUN", str(run), f"{text} of its newest checkpoint")
        adapter = read_adapter(found[-1]).adapter  # damaged ones are not published
        step, images = _samples(run)
        return Publication(
            config, found[-1], step, images, readers(adapter, config.adapter_file.layout)
        )

    @property
    def file(self) -> str:
        """Return the name of the LoRA in the repository."""
        return f"{self.config.adapter_file.name}.safetensors"

    @property
    def base(self) -> str:
        """Return the name of the base model at the Hub; "" if it is of other sizes, and not there."""
        sizes, own = ModelConfig(), self.config.model
        if any(getattr(own, name) != getattr(sizes, name) for name in _SIZES):
            return ""
        if not self.config.model.guidance_embed:
            return f"{_PUBLISHER}/{_OPEN}"
        name = Path(self.config.initial_weights or "").name.lower()
        named = next((to for word, to in _OTHERS.items() if word in name), _DEV)
        return f"{_PUBLISHER}/{own.takes.repository if own.takes else named}"

    def files(self) -> dict[str, Path]:
        """Return the files by their paths in the repository, without the card."""
        images = {f"{_IMAGES}/{path.name}": path for path, _ in self.images}
        return {self.file: self.lora, **images}

    def card(self, repo: str, trigger: str | None = None) -> str:
        """Return the model card; ``trigger`` is the word for its pictures (default: the captions' prefix)."""
        trigger = trigger or self.config.data.caption_prefix.strip(" ,") or None
        front = yaml.safe_dump(
            self._front_matter(trigger), allow_unicode=True, sort_keys=False, width=1000
        )
        title = repo.rpartition("/")[2]
        parts = [f"---\n{front}---", f"# {title}", "<Gallery />"]
        of_own = "a small model, which is not published"
        link = f"[{self.base}](https://huggingface.co/{self.base})" if self.base else of_own
        parts.append(f"A LoRA of {link}.")
        if trigger:
            quotes = "``" if "`" in trigger else "`"
            word = " ".join(trigger.split())
            parts += ["## Trigger", f"Write {quotes} {word} {quotes} in the prompt."]
        parts += ["## Use it", *self._use(repo)]
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in self._settings())
        parts += ["## Settings", f"| | |\n|---|---|\n{rows}"]
        parts += ["## Licence", self._licence()]
        return "\n\n".join(parts) + "\n"

    def _front_matter(self, trigger: str | None) -> dict[str, Any]:
        front: dict[str, Any] = {"license": "apache-2.0" if self.base else "unknown"}
        if self.base and not self.base.endswith(_OPEN):
            front = {
                "license": "other",
                "license_name": "flux-1-dev-non-commercial-license",
                "license_link": f"https://huggingface.co/{self.base}/blob/main/LICENSE.md",
            }
        if self.base:
            front |= {"base_model": self.base, "base_model_relation": "adapter"}
        front |= {
            "library_name": "diffusers",
            "pipeline_tag": "image-to-image" if self.config.model.takes else "text-to-image",
            "tags": ["flux", "lora", "diffusers", "text-to-image", "template:sd-lora", "fluxtrain"],
        }
        if trigger:
            front["instance_prompt"] = trigger
        widget = [
            {"text": " ".join(prompt.split()), "output": {"url": f"{_IMAGES}/{path.name}"}}
            for path, prompt in self.images
        ]
        return front | ({"widget": widget} if widget else {})

    def _use(self, repo: str) -> list[str]:
        if not self.base:
            return [
                "`fluxtrain sample BASE --adapter FILE --prompt PROMPT`, with the run of its base."
            ]
        parts = [f"Read by {self.readers}."]
        if takes := self.config.model.takes:
            parts.append(f"In diffusers, `{takes.pipeline}` takes it, and the picture to change.")
        elif "diffusers" in self.readers and "not diffusers" not in self.readers:
            prompt = next((prompt for _, prompt in self.images), "a prompt")
            parts.append(
                "```python\nimport torch\nfrom diffusers import DiffusionPipeline\n\n"
                f'pipeline = DiffusionPipeline.from_pretrained("{self.base}", '
                'torch_dtype=torch.bfloat16).to("cuda")\n'
                f'pipeline.load_lora_weights("{repo}", weight_name="{self.file}")\n'
                f"image = pipeline({_code(prompt)!r}).images[0]\n```"
            )
        if "ComfyUI" in self.readers:
            text = f"In ComfyUI put `{self.file}` into `models/loras` and choose it in the node *Load LoRA*"
            parts.append(f"{text} between the model and the sampler.")
        return parts

    def _settings(self) -> list[tuple[str, str]]:
        config, adapter = self.config, self.config.adapter
        assert adapter is not None
        schedule, optim = config.schedule, config.optim
        rows = [
            ("kind", f"{adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g}"),
            ("layout", f"{config.adapter_file.layout}, {config.adapter_file.dtype}"),
            ("steps", f"{schedule.steps:,} of {schedule.global_batch_size} samples"),
            ("learning rate", f"{optim.learning_rate:g}, {schedule.decay}"),
            ("warm-up", f"{schedule.warmup_steps} steps"),
            ("optimizer", optim.name),
            ("image size", f"{config.data.image_size} px"),
            ("precision", config.precision.compute),
            ("seed", str(config.seed)),
        ]
        if self.step is not None:
            rows.append(("samples", f"of step {self.step:,}"))
        return [*rows, ("trainer", f"fluxtrain {__version__}")]

    def _licence(self) -> str:
        if not self.base:
            return "That of its base model and of the pictures it learnt from."
        if self.base.endswith(_OPEN):
            return (
                "Apache 2.0, as the base model's; the pictures it learnt from may have their own."
            )
        link = f"https://huggingface.co/{self.base}/blob/main/LICENSE.md"
        return f"It falls under the base model's [non-commercial licence]({link})."


def _samples(run: Path) -> tuple[int | None, list[tuple[Path, str]]]:
    """Return the newest step with samples, and those of it that can be read, with their prompts."""
    for folder in sorted((run / SAMPLES_FOLDER).glob("step_*/"), reverse=True):
        found = list[tuple[Path, str]]()
        for path in sorted(folder.glob("*.png"))[:_MOST_IMAGES]:
            try:
                with Image.open(path) as image:
                    found.append((path, str(image.info.get("prompt", ""))))
            except (OSError, ValueError, SyntaxError):
                continue
        if found:
            return int(folder.name.removeprefix("step_")), found
    return None, []


def _code(text: str) -> str:
    """Return ``text`` on one line that ends no code."""
    return " ".join(text.replace("`", "'").split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def push(files: Mapping[str, Path], card: str, repo: str, is_public: bool) -> str:
    """Publish ``files`` and the ``card`` in ``repo`` of the Hub; return its address.

    A new repository is private unless ``is_public``. What is there already is not sent again; images of a
    former push are removed. Raises ConfigError without a token, for a bad name, or before anything would be
    seen by all in a repository that is public already.
    """
    if not _REPO.fullmatch(repo):
        raise ConfigError("REPO", repo, "must be OWNER/NAME, such as my-name/my-style")
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors, get_token

    if get_token() is None:
        text = "a token that may write, of https://huggingface.co/settings/tokens, or run `hf auth login`"
        raise ConfigError("HF_TOKEN", UNSET, f"set it to {text}")
    api = HfApi(library_name="fluxtrain", library_version=__version__)
    try:
        try:
            there = api.model_info(repo)
        except errors.RepositoryNotFoundError:
            api.create_repo(repo, private=not is_public)
            there = api.model_info(repo)
        if not there.private and not is_public:
            text = (
                "is public, so that all would see it; give --public, or make it private at the Hub"
            )
            raise ConfigError("REPO", repo, text)
        names = {each.rfilename for each in there.siblings or []}
        old = sorted(n for n in names if n.startswith(f"{_IMAGES}/") and n not in files)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, path) for name, path in files.items()
        ]
        operations.append(CommitOperationAdd(CARD_FILE, card.encode()))
        operations += [CommitOperationDelete(name) for name in old]
        api.create_commit(repo, operations, commit_message="Publish the LoRA of a run")
    except errors.HfHubHTTPError as error:
        raise _hub_error(repo, error) from None
    except ConfigError:
        raise
    except errors.HFValidationError as error:
        raise ConfigError("REPO", repo, one_line(str(error))) from None
    except Exception as error:  # of the HTTP library that the client uses
        reason = one_line(f"{type(error).__name__}: {error}")[:200]
        text = f"the Hub cannot be used ({reason}); the same command continues"
        raise DownloadError(f"{repo}: {text}") from None
    return f"{api.endpoint}/{repo}"


def _hub_error(repo: str, error: Any) -> DataError | DownloadError:
    code = error.response.status_code if error.response is not None else 0
    if code == 404:
        return DataError(f"{repo}: the Hub has no such address ({one_line(str(error))[:200]})")
    if code in (401, 403):
        text = "the token may not write there; use one of its owner with write access"
        return DataError(f"{repo}: {text}: https://huggingface.co/settings/tokens")
    return DownloadError(f"{repo}: the Hub answered {code}; try again")
