"""Adapters of CLIP-L in kohya's sd-scripts, which trains them unless only the transformer is asked for."""

from __future__ import annotations

from fluxtrain.contract.run.immutable_fields import value_at
from fluxtrain.other_trainers import kohya_values as values
from fluxtrain.other_trainers.option import Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

FIELDS = ["adapter.clip.rank", "adapter.clip.alpha"]
RATE = "adapter.clip.rate"
ALL_UP, UP = "adapter.rates.up", "adapter.clip.up"
LORA_PLUS, LORA_PLUS_UNET, LORA_PLUS_CLIP = (
    f"network_args.loraplus_{part}lr_ratio" for part in ("", "unet_", "text_encoder_")
)
_ONLY = "network_train_unet_only"
_IMAGES = ("train_data_dir", "dataset_config")


def unet_only(reading: Reading, name: str) -> Values:
    """Return the rank and alpha of CLIP's adapters, those of the transformer's, unless there are none."""
    if not _trains_clip(reading):
        reading.notes[name] = "adapters are the transformer's only"
        return {}
    why = "sd-scripts trains adapters of CLIP-L too, unless this is true; here "
    if reading.word("network_module") != "networks.lora_flux":
        kind = _network(reading)
        raise NoCounterpartError(f"{why}those are networks.lora_flux's, not {kind}")
    if not _has_images(reading):
        raise NoCounterpartError(f"{why}adapter.clip does, with the captions of data.images")
    alpha = values.alpha(reading, "network_alpha")["adapter.alpha"]
    rank = reading.positive("network_dim")
    reading.notes[name] = "sd-scripts trains adapters of CLIP-L too, unless this is true"
    return {**dict(zip(FIELDS, (rank, alpha), strict=True)), **_rate(reading)}


def text_encoder_rate(reading: Reading, name: str) -> Values:
    """Return the factor of the learning rate of CLIP's adapters: over that of the transformer's."""
    if not _trains_clip(reading) and not _is_left_out(reading):
        reading.notes[name] = "0 trains no text encoder"
        return {}
    return _required_rate(reading)


def up_of_all(reading: Reading, name: str) -> Values:
    """Return the factor of all matrices B, and that of CLIP's if the transformer's have another one."""
    own = _transformer_up(reading, name)
    is_other = reading.has(LORA_PLUS_UNET) and _has_clip(reading)
    return {**own, UP: reading.number(name)} if is_other else own


def up_of_transformer(reading: Reading, name: str) -> Values:
    """Return the factor of the transformer's matrices B; 1 for CLIP's, unless others set it."""
    own = _transformer_up(reading, name)
    is_alone = not reading.has(LORA_PLUS) and _has_clip(reading)
    return {**own, UP: 1.0} if is_alone else own


def up_of_clip(reading: Reading, name: str) -> Values:
    """Return the factor of CLIP's matrices B."""
    value = reading.number(name)
    _required_rate(reading)
    return {UP: value}


_transformer_up = values.of_lora(ALL_UP, Reading.number)


def _has_clip(reading: Reading) -> bool:
    """Return whether `unet_only` writes adapters of CLIP."""
    try:
        _required_rate(reading)
    except NoCounterpartError:
        return False
    return True


def _required_rate(reading: Reading) -> Values:
    """Return the factor of the learning rate of CLIP's adapters, unless it is 1.

    Raises InertError if CLIP has none there, NoCounterpartError if it cannot have them here.
    """
    if not _trains_clip(reading):
        raise InertError("adapters are the transformer's only")
    if reading.word("network_module") != "networks.lora_flux" or not _has_images(reading):
        raise NoCounterpartError("CLIP-L has no adapters here")
    return _rate(reading)


def _network(reading: Reading) -> str:
    """Return what the adapters are there, for messages; LyCORIS has an algo, and DoRA with dora_wd."""
    name, algorithm = reading.text("network_module"), "network_args.algo"
    if reading.has(algorithm):
        name += f"'s {reading.word(algorithm)}"
    return f"{name} with DoRA" if reading.is_on("network_args.dora_wd") else name


def _is_left_out(reading: Reading) -> bool:
    return reading.is_on(_ONLY) or not reading.has("network_module")


def _trains_clip(reading: Reading) -> bool:
    return (
        reading.has("network_module")
        and not reading.is_on(_ONLY)
        and (not reading.has("text_encoder_lr") or _text_rate(reading) > 0)
    )


def _has_images(reading: Reading) -> bool:
    if any(reading.has(option) for option in _IMAGES):
        return True
    given: object = value_at(reading.overrides, "data.images")
    return given is not None


def _rate(reading: Reading) -> Values:
    """Return the factor of the learning rate, unless it is 1."""
    own = reading.number("unet_lr" if reading.has("unet_lr") else "learning_rate")
    rate = float(f"{_text_rate(reading) / own:.12g}") if own > 0 else 1.0
    if rate == 1:
        return {}
    if reading.word("optimizer_type") == "prodigy":
        raise NoCounterpartError("Prodigy finds one step size for all adapters")
    return {RATE: rate}


def _text_rate(reading: Reading) -> float:
    """Return the learning rate of text encoders, of a list that of the first: CLIP-L; T5's is the second."""
    name = "text_encoder_lr"
    if not reading.has(name):
        return reading.number("learning_rate")
    value = reading.value(name)
    each = value if isinstance(value, list) else [value]
    rates = [Reading({name: rate}, {}).number(name) for rate in each]
    if len(rates) not in (1, 2) or min(rates) < 0:
        raise reading.wrong(name, "must be 0 or more, of CLIP-L, or of CLIP-L and T5")
    return rates[0]
