"""Prompt files in kohya's syntax: what each option sets, and the line of each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError
from fluxtrain.sample.denoise import batches, noise_of, settings_of, turns
from fluxtrain.sample.prompts import Prompt, check_sampling, read_prompts


def make_config(**changes: Any) -> RunConfig:
    return resolve({"preset": "dev-lora", "sampling": {"prompt_file": "prompts.txt"}, **changes})


def read(text: str, folder: Path, **changes: Any) -> list[Prompt]:
    path = folder / "prompts.txt"
    path.write_bytes(text.encode())
    return read_prompts(path, make_config(**changes))


def test_options_comments_and_blank_lines(tmp_path: Path) -> None:
    text = "\ufeff# comment --w 3\n\n a red heart \n  # another\n"
    text += "A house, by night --w 1280 --H 776 --d 42 --s 12 --l 4.5 --g 2 --n blurry, text\r\n"
    plain, house = read(text, tmp_path)
    assert plain == Prompt("a red heart", 1024, 1024, 1234, 0, 28, 1.0, 3.5)
    assert house == Prompt(
        "A house, by night", 1280, 768, 42, 0, 12, 4.5, 2.0, negative="blurry, text"
    )


def test_prompts_without_a_seed_have_draws_of_their_own(tmp_path: Path) -> None:
    first, _, third = read("a\nb --d 7\nc", tmp_path)
    assert (first.seed, first.index, third.seed, third.index) == (1234, 0, 1234, 2)


def test_dashes_without_an_option_are_part_of_the_prompt(tmp_path: Path) -> None:
    (prompt,) = read("well-made -- a t-shirt --s 4", tmp_path)
    assert (prompt.text, prompt.num_steps) == ("well-made -- a t-shirt", 4)


MISTAKES = [
    ("a\nb --ss euler_a", "line 2", "--ss has no effect: the sampler is always Euler's"),
    ("a --cn edges.png", "line 1", "--cn has no effect: model.condition is none"),
    ("# c\n\na --q 3", "line 3", "--q is unknown; use --w, --h, --d, --s, --l, --g, --n"),
    ("a --w wide", "line 1", "--w wide: must be a whole number from 16 to 8192"),
    ("a --h 0", "line 1", "--h 0: must be a whole number from 16 to 8192"),
    ("a --w 9", "line 1", "--w 9: must be a whole number from 16 to 8192"),
    ("a --d -1", "line 1", "--d -1: must be"),
    ("a --s 1001", "line 1", "from 1 to 1000"),
    ("a --s 4 --s 5", "line 1", "--s is given twice"),
    ("red\x1b[31m apple", "line 1", "has control characters"),
    ("a\u2028b\ra\v b", "line 2", "has control characters"),
    ("a --l nan", "line 1", "--l nan: must be a number from 0 to 100"),
    ("a --g", "line 1", "--g : must be a number"),
    ("a --n", "line 1", "--n: must be a text"),
    ("a --n --l 4", "line 1", "--n: must be a text"),
    ("a --l --d 4", "line 1", "--l : must be a number"),
    ("a --n dark", "line 1", "--n has no effect with classifier-free guidance 1"),
    ("--w 512", "line 1", "no prompt before the options"),
    ("x" * 1025, "line 1", "more than 1024 characters"),
    ("# only\n", "prompts.txt", "it has no prompt"),
    ("a\n" * 257, "line 257", "at most 256 prompts"),
]


@pytest.mark.parametrize(("text", "place", "message"), MISTAKES, ids=lambda value: value[:24])
def test_a_mistake_is_named_with_its_line(
    text: str, place: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read(text, tmp_path)
    assert place in str(error.value)
    assert message in str(error.value)
    assert error.value.path == "spec.run.sampling.prompt_file"


def test_guidance_of_a_model_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--g has no effect"):
        read("a --g 3", tmp_path, preset="schnell-lora")
    (prompt,) = read("a", tmp_path, preset="schnell-lora")
    assert prompt.guidance is None


@pytest.mark.parametrize("name", ["none.txt", "prompts.json", "latin.txt"])
def test_files_that_cannot_be_read_are_refused_before_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    config = make_config(sampling={"prompt_file": name, "every_steps": 5})
    with pytest.raises(ConfigError, match=name):
        check_sampling(config, tmp_path, tmp_path)


def test_images_of_one_batch_are_alike_and_fit_the_memory_of_a_step(tmp_path: Path) -> None:
    lines = ["a", "b --s 4", "c --w 512 --h 512", "d", "e --l 2", "f --w 512 --h 512", "g"]
    config = make_config(parallel={"micro_batch_size": 2})
    prompts = read("\n".join(lines), tmp_path, parallel={"micro_batch_size": 2})
    assert sorted(batches(prompts, config)) == [[0, 3], [1], [2, 5], [4], [6]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 4096])
def test_ranks_sample_different_prompts_with_equally_many_steps(ranks: int, tmp_path: Path) -> None:
    lines = [f"{index} --s {2 + index % 3} --w {256 * (1 + index % 2)}" for index in range(11)]
    config = make_config(parallel={"micro_batch_size": 4})
    prompts = read("\n".join(lines), tmp_path, parallel={"micro_batch_size": 4})
    found = list(turns(prompts, config, ranks))
    for turn in found:
        assert 1 <= len(turn) <= ranks
        assert len({prompts[index].num_steps for batch in turn for index in batch}) == 1
    assert sorted(index for turn in found for batch in turn for index in batch) == list(range(11))
    longest = sum(max(map(len, turn)) for turn in found)
    assert {1: 11, 2: 6, 3: 5, 7: 3, 4096: 3}[ranks] == longest


def test_the_noise_of_a_prompt_does_not_depend_on_others(tmp_path: Path) -> None:
    config = make_config()
    one, two = read("a --w 64 --h 32 --d 5\nb --w 64 --h 32 --d 6", tmp_path)
    (alone,) = read("b --w 64 --h 32 --d 6", tmp_path)
    together = noise_of([one, two], config)
    assert together.shape == (2, 16, 4, 8)
    assert together[1:].equal(noise_of([alone], config))
    assert not together[0].equal(together[1])
    assert settings_of(one, config).num_steps == 28
