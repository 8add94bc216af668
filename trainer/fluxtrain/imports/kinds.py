"""Kinds of training of other trainers that have no counterpart, by the options that ask for them."""

from __future__ import annotations

import re
from collections.abc import Callable

from fluxtrain.imports.table import Kind, Reading, is_on, says

# Kinds that the name of a model says. FLUX.1's own words stand last: a part that has only those is
# a model that is trained here.


_KONTEXT = "Kontext, which edits pictures"
_MODELS = (
    (_KONTEXT, r"kontext"),
    ("Fill, which inpaints", r"\bfill\b|inpaint"),
    ("Redux, which varies pictures", r"redux"),
    ("a ControlNet", r"control-?net"),
    ("control pictures of edges or depths", r"\b(canny|depth)\b"),
    ("an IP-Adapter", r"\bip-?adapter"),
    ("Chroma", r"chroma"),
    ("Flex, which is not FLUX", r"\bflex-?[12]"),
    ("FLUX.2", r"flux-?2(?!\d)|\bklein\b"),
    ("LibreFLUX or OpenFLUX, which have no guidance", r"(libre|open)-?flux"),
    ("FLUX.1 lite, which has fewer blocks", r"flux(-?1)?-lite"),
    (
        "another model than FLUX.1",
        r"\bsd-?xl|stable-?diffusion|\bsd-?[123]|\bv1-5\b|\bwan(-?ai|-?2|\b)|hunyuan|lumina|qwen|"
        r"hi-?dream|\bltx|pixart|\bsana\b|auraflow|omnigen|cosmos|kolors|\bz-?image|cogview|\bpony|"
        r"illustrious|deep-?floyd|wuerstchen|cascade|krea-?2|ideogram|framepack|\banima\b|\bernie",
    ),
)
_GENERIC = re.compile(
    r"(transformer|unet|models?|checkpoints?|weights|snapshots|diffusion-pytorch-model.*|model-0.*|"
    r"pytorch-model.*|consolidated.*|[0-9a-f]{40}|\d+)?(-safetensors|-sft|-ckpt|-pt)?"
)
"""Parts of paths that say nothing of the model."""
_LONGEST = 1000
"""Characters of a path that are read, from its end."""


def of_model(name: str) -> str | None:
    """Return the kind of training that a model's ``name`` or path says; None: one that is trained here.

    The last part of a path that is not ``_GENERIC`` counts.
    """
    ending = name[-_LONGEST:].lower()
    parts = [re.sub(r"[\W_]+", "-", part).strip("-") for part in re.split(r"[/\\]", ending)]
    part = next((it for it in reversed(parts) if not _GENERIC.fullmatch(it)), "")
    return next((text for text, pattern in _MODELS if re.search(pattern, part)), None)


def _models(option: str, unless: str = "initial_weights") -> tuple[Kind, ...]:
    """Return the kinds that the names of models in ``option`` say."""

    def named(text: str) -> Callable[[Reading, str], bool]:
        return lambda reading, name: (
            of_model(str(reading.value(name))) == text
            and not (text == _KONTEXT and is_kontext(reading))
        )

    return tuple(Kind(text, option, named(text), unless) for text, _ in _MODELS)


def is_kontext(reading: Reading) -> bool:
    """Return whether the options of ai-toolkit or SimpleTuner ask for Kontext by their own word for it."""
    asked = (("model.arch", "flux_kontext"), ("model_flavour", "kontext"))
    return any(str(reading.value(name)).lower() == word for name, word in asked)


def _are_references(reading: Reading, name: str) -> bool:
    """Return whether the option asks for control pictures, but not one for each picture of Kontext."""
    value = reading.value(name)
    is_one = isinstance(value, str) or (isinstance(value, list) and len(value) == 1)
    return is_on(value) and not (is_one and is_kontext(reading))


def _without(other: str) -> Callable[[Reading, str], bool]:
    """Return whether an option asks for something while the option ``other`` does not."""
    return lambda reading, name: is_on(reading.value(name)) and not is_on(reading.value(other))


REFERENCE = r"^reference_(strict|loose)$"
"""Pattern of SimpleTuner's ``conditioning_type`` of Kontext's pictures."""
_PRIOR = "DreamBooth's regularisation pictures, for which docs/data.md has is_reg of a subset"
_CONTROL = (
    "pictures as conditions, as ControlNet's, or several; Kontext takes one for each picture, data.controls "
    "for data.images, as fluxtrain init PAIRS --base=kontext writes for PAIRS/control and PAIRS/target"
)
_PAIRS = "a slider"
_INVERSION = "textual inversion"
_OTHER_MODEL = "another model than FLUX.1"
_OTHER_ADAPTER = "adapters of another kind"
_OTHER_ALGORITHM = r"^(?!lokr$|loha$|lora$|locon$|full$)"

_ALL = (
    Kind("DPO, which learns from preferences", r"(.*[_.])?dpo([_.].*)?"),
    Kind("an IP-Adapter", r"(.*[_.])?ip_adapter.*"),
    Kind("Redux, which varies pictures", r"(.*[_.])?redux.*"),
    Kind(_PAIRS, r"(.*[_.])?sliders?([_.].*)?"),
    Kind("a distillation", r"(.*[_.])?(distillation_method|twinflow_enabled|teacher_model\w*)"),
    Kind("a distillation to some timesteps", "flow_custom_timesteps"),
    Kind(_INVERSION, r"(.*[_.])?(token_string|num_vectors_per_token|placeholder_token|init_word)"),
)
"""Options that have the same name wherever they are."""

KOHYA_KINDS = (
    *_models("pretrained_model_name_or_path"),
    Kind("Chroma", "model_type", says("^chroma")),
    Kind(_OTHER_MODEL, "model_type", says("^(?!flux$)")),
    Kind(_OTHER_MODEL, "model_train_type", says("^(?!flux-)")),
    Kind("inpainting", "train_inpainting"),
    Kind(_OTHER_MODEL, r"clip_g|gemma2|qwen3|llm_adapter_path|byt5|dit"),
    Kind(
        "a network, but no network_module: networks.lora_flux is a LoRA",
        r"network_(dim|alpha|weights|args\..+)|dim_from_weights",
        lambda reading, name: not reading.has("network_module"),
        "adapter.kind",
    ),
    Kind("a ControlNet-LLLite", "network_module", says("control_net")),
    Kind(_OTHER_MODEL, "network_module", says(r"^networks\.lora_(?!flux$|fa$|diffusers$)")),
    Kind(
        _OTHER_ADAPTER,
        "network_module",
        says(r"^(?!networks\.lora(_flux)?$|lycoris\.kohya$)"),
        "adapter.kind",
    ),
    Kind(
        "LyCORIS' full, which trains all weights",
        r"network_args\.algo",
        lambda reading, name: (
            says("^full$")(reading, name) and says("lycoris")(reading, "network_module")
        ),
        "adapter.kind",
    ),
    Kind(
        _OTHER_ADAPTER,
        r"network_args\.algo",
        lambda reading, name: (
            says(_OTHER_ALGORITHM)(reading, name) and says("lycoris")(reading, "network_module")
        ),
        "adapter.kind",
    ),
    Kind("a ControlNet", r"controlnet_\w+"),
    Kind(_CONTROL, "conditioning_data_dir", _without("masked_loss")),
    Kind("adapters of text encoders alone", "network_train_text_encoder_only"),
    Kind(_INVERSION, "use_object_template|use_style_template"),
    Kind(_INVERSION, "train_mode", says("inversion")),
    Kind(_PRIOR, "reg_data_dir", unless="data.images"),
    *_ALL,
)

_ADAPTER = "adapter"
_ADAPTERS = (
    ("Redux, which varies pictures", "redux"),
    ("an IP-Adapter", "^ip"),
    ("a ControlNet", "control_?net"),
    ("a control LoRA", "control_lora"),
    ("an adapter for pictures", "."),
)

AI_TOOLKIT_KINDS = (
    Kind("a job that trains nothing", "job", says("^(?!extension$|train$)")),
    *(Kind(text, r"adapter\.type", says(pattern)) for text, pattern in _ADAPTERS),
    Kind("an adapter for pictures", r"adapter\..+", _without(f"{_ADAPTER}.type")),
    *_models(r"model\.arch", ""),
    *_models(r"model\.(name_or_path|unet_path)"),
    Kind(
        _OTHER_MODEL,
        r"model\.is_(xl|v2|v3|pixart|pixart_sigma|auraflow|lumina2|ssd|vega|v_pred|chroma|qwen_image)",
    ),
    Kind(_PAIRS, "type", says("slider|reference|concept_replacer")),
    Kind(_INVERSION, "type", says("textual_inversion")),
    Kind("an autoencoder", "type", says("^vae$")),
    Kind(_INVERSION, r"embedding\..+"),
    Kind("tokens before the prompt", r"decorator\..+"),
    Kind("LoRM", r"do_lorm|network\.lorm(\..*)?"),
    Kind("LoRM", r"network\.type", says("^lorm$")),
    Kind(_OTHER_ADAPTER, r"network\.type", says("^(?!lora$|lokr$|dora$|locon$)"), "adapter.kind"),
    Kind(_CONTROL, r"datasets\.control_path", _are_references),
    Kind(_CONTROL, r"datasets\.(control_path_\d+|controls|control_from_same_folder)"),
    Kind("inpainting", r"datasets\.inpaint_path|.*inpaint.*"),
    Kind("pictures as prompts, as Redux's", r"datasets\.clip_image_(path|from_same_folder)"),
    Kind(_PAIRS, r"datasets\.unconditional_path|guidance\..+"),
    Kind(_PAIRS, r"datasets\.type", says("slider|reference|pair")),
    Kind("films", r"datasets\.num_frames", lambda reading, name: reading.number(name) > 1),
    Kind("films", r"datasets\.(do_audio|auto_frame_count)"),
    Kind(_PRIOR, r"datasets\.is_reg", unless="data.images"),
    *_ALL,
)

SIMPLETUNER_KINDS = (
    *_models("model_family", ""),
    *_models("model_flavour|pretrained_(transformer_)?model_name_or_path"),
    Kind("a ControlNet", "controlnet"),
    Kind("a ControlNet", "flux_lora_target", says("control")),
    Kind("control pictures, beside the noise", "control"),
    Kind(
        _CONTROL,
        r"conditioning\.conditioning_type",
        lambda reading, name: (
            says(r"^(?!mask$|segmentation$)")(reading, name)
            and not (says(REFERENCE)(reading, name) and is_kontext(reading))
        ),
    ),
    Kind(_CONTROL, r"backend\.conditioning"),
    Kind(_CONTROL, r"backend\.conditioning_data", _without("conditioning.conditioning_type")),
    Kind("films", r"backends\.dataset_type", says("video|audio")),
    Kind("BitFit, which trains biases alone", "layer_freeze_strategy", says("bitfit")),
    Kind(_INVERSION, "model_type", says("embedding|textual")),
    Kind(_PAIRS, r"slider_lora_target|backend\.slider_strength"),
    Kind(
        "LyCORIS' full, which trains all weights", r"lycoris\.algo", says("^full$"), "adapter.kind"
    ),
    Kind(_OTHER_ADAPTER, r"lycoris\.algo", says(_OTHER_ALGORITHM), "adapter.kind"),
    Kind(_PRIOR, r"backend\.is_regulari[sz]ation_data", unless="data.images"),
    *_ALL,
)

DIFFUSERS_KINDS = (
    *_models("pretrained_model_name_or_path"),
    Kind(_PRIOR, "with_prior_preservation", unless="data.images"),
    *_ALL,
)

ONETRAINER_KINDS = (
    Kind("Fill, which inpaints", "model_type", says("^flux_fill")),
    Kind(_OTHER_MODEL, "model_type", says("^(?!flux_dev_1$)")),
    *_models("base_model_name"),
    Kind(_INVERSION, "training_method", says("^embedding$")),
    Kind("an autoencoder", "training_method", says("^fine_tune_vae$")),
    Kind(_OTHER_ADAPTER, "peft_type", says("^oft"), "adapter.kind"),
)
