"""A training step of a LoRA on torchtitan's ``flux-debug``, compared with diffusers and SimpleTuner.

Both peers run the loop of diffusers' training script with peft's adapters, on diffusers' model and on
SimpleTuner's. Every contender has the same torch, base, adapters, batch and threads, and trains every linear
layer of the blocks, with queries, keys and values apart.
"""

from __future__ import annotations

from benchmarks.training.step import parser, race, report

NAMES = ("fluxtrain", "diffusers", "simpletuner")


def main(arguments: list[str] | None = None) -> None:
    """Compare eager, then compiled."""
    options_parser = parser("benchmarks.training.lora", __doc__, NAMES)
    options_parser.add_argument("--rank", type=int, default=16, help="of the LoRA")
    options = options_parser.parse_args(arguments)
    for kind in options.kinds:
        title = f"training step of a LoRA of rank {options.rank}, {kind}"
        report(title, options, race(options, kind == "compiled"))


if __name__ == "__main__":
    main()
