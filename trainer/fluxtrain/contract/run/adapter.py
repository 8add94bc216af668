"""AdapterConfig: low-rank adapters, which are trained instead of the model's weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fluxtrain.contract.model_base import Path, Rule, StrictModel

Rank = Annotated[int, Field(ge=1, le=1024)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
KindRank = Annotated[int, Field(ge=0, le=1024)] | None
AdapterKind = Literal["lora", "lokr", "loha"]
BaseDtype = Literal["compute", "fp8"]
AdapterLayout = Literal["kohya", "diffusers", "ai-toolkit", "bfl"]
LayerName = Literal[
    "img_mod.lin",
    "img_attn.qkv",
    "img_attn.proj",
    "img_mlp.0",
    "img_mlp.2",
    "txt_mod.lin",
    "txt_attn.qkv",
    "txt_attn.proj",
    "txt_mlp.0",
    "txt_mlp.2",
    "linear1",
    "linear2",
    "modulation.lin",
]
AdapterDtype = Literal["bfloat16", "float16", "float32"]


def _as_text(value: object) -> object:
    """Return the number of one block, which YAML reads as an integer, as a text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Blocks = Annotated[
    str,
    Field(
        max_length=256,
        pattern="^(all|none|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*)$",
        title="all, none, or numbers from 0 and ranges of them, such as 0,4-7",
        json_schema_extra={"x-kubernetes-int-or-string": True, "minimum": 0, "maximum": 9999},
    ),
    BeforeValidator(_as_text),
]


class AdapterRanks(StrictModel):
    """Ranks of kinds of layers; null: that of ``adapter.rank``, 0: layers without an adapter."""

    img_attn: KindRank = None
    """``qkv`` and ``proj`` of the image stream of double blocks."""
    txt_attn: KindRank = None
    """``qkv`` and ``proj`` of the text stream of double blocks."""
    img_mlp: KindRank = None
    """Both layers of the MLP of the image stream of double blocks."""
    txt_mlp: KindRank = None
    """Both layers of the MLP of the text stream of double blocks."""
    img_mod: KindRank = None
    """Modulation of the image stream of double blocks."""
    txt_mod: KindRank = None
    """Modulation of the text stream of double blocks."""
    single: KindRank = None
    """``linear1`` and ``linear2`` of single blocks."""
    single_mod: KindRank = None
    """Modulation of single blocks."""


Ratio = Annotated[float, Field(gt=0, le=1000)]


class AdapterRates(StrictModel):
    """Factors of the learning rate for adapters of kinds of layers, as in ``adapter.ranks``."""

    img_attn: Ratio = 1.0
    """``qkv`` and ``proj`` of the image stream of double blocks."""
    txt_attn: Ratio = 1.0
    """``qkv`` and ``proj`` of the text stream of double blocks."""
    img_mlp: Ratio = 1.0
    """Both layers of the MLP of the image stream of double blocks."""
    txt_mlp: Ratio = 1.0
    """Both layers of the MLP of the text stream of double blocks."""
    img_mod: Ratio = 1.0
    """Modulation of the image stream of double blocks."""
    txt_mod: Ratio = 1.0
    """Modulation of the text stream of double blocks."""
    single: Ratio = 1.0
    """``linear1`` and ``linear2`` of single blocks."""
    single_mod: Ratio = 1.0
    """Modulation of single blocks."""
    up: Ratio = 1.0
    """The matrices B, from the rank up, of all layers: LoRA+ advises 16. Those of CLIP too, unless
    ``adapter.clip.up`` is set."""

    @property
    def is_one(self) -> bool:
        """Return whether all adapters have the same learning rate."""
        return all(factor == 1 for _, factor in self)


class LokrConfig(StrictModel):
    """How ``kind: lokr`` divides a weight into the factors w1 and w2 of a Kronecker product, as LyCORIS."""

    factor: Annotated[int, Field(ge=-1, le=65_536)] = -1
    """Most rows and columns of w1, the smaller factor; -1: as many as w2 has, as far as they divide."""
    decompose_both: bool = False
    """Make w1 a product of ``rank`` too, where that is smaller; w2 always is."""
    full_matrix: bool = False
    """Make neither a product of ``rank``; alpha then has no effect."""


class ClipAdapterConfig(StrictModel):
    """Adapters of the CLIP text encoder: of attention's four projections and the MLP in its 12 layers."""

    rank: Rank = 16
    """Rank of the update."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """Scale of the update: alpha / rank."""
    rate: Ratio = 1.0
    """Factor of the learning rate."""
    up: Ratio | None = None
    """Factor of the learning rate of its matrices B, next to ``rate``: LoRA+; null: ``adapter.rates.up``."""

    @property
    def is_one(self) -> bool:
        """Return whether its adapters have the learning rate of the others."""
        return self.rate == 1 and self.up in (None, 1)


_WHOLE_UPDATE = "the norms of its rows are of the whole update"
_IS_OFF = {"0": "double(self.{}) == 0.0", "false": "!self.{}", "null": "!has(self.{})"}
"""CEL expressions that a field has the value with which it is off."""


def _off_unless_lora(field: str, off: str, why: str) -> Rule:
    return Rule(
        field,
        f"must be {off} unless kind is lora: {why}",
        lambda adapter: adapter.kind == "lora" or not getattr(adapter, field),
        f"self.kind == 'lora' || {_IS_OFF[off].format(field)}",
        others=("kind",),
    )


def _off_with_dora(field: str, off: str, why: str) -> Rule:
    return Rule(
        field,
        f"must be {off} if dora is on: {why}",
        lambda adapter: not adapter.dora or not getattr(adapter, field),
        f"!self.dora || {_IS_OFF[off].format(field)}",
        others=("dora",),
    )


class AdapterConfig(StrictModel):
    """Adapters of the blocks' linear layers: W becomes W + alpha / rank x B A, or another small update. They
    are trained instead of the model's weights, which stay as they are, in ``precision.compute``."""

    rules: ClassVar = (
        Rule(
            "lokr",
            "must be left out unless kind is lokr",
            lambda adapter: adapter.kind == "lokr" or adapter.lokr == LokrConfig(),
            "self.kind == 'lokr'",
            others=("kind",),
        ),
        Rule(
            "lokr.factor",
            "must be -1, or 1 and more",
            lambda adapter: adapter.lokr.factor != 0,
            "self.lokr.factor != 0",
        ),
        _off_unless_lora("split_qkv", "false", "others update the whole layer"),
        _off_unless_lora("dropout", "0", "it is of A x"),
        _off_unless_lora("rank_dropout", "0", "it is of A x"),
        _off_unless_lora("dora", "false", "its magnitudes are of a low-rank update"),
        _off_with_dora("dropout", "0", _WHOLE_UPDATE),
        _off_with_dora("rank_dropout", "0", _WHOLE_UPDATE),
        _off_with_dora("module_dropout", "0", _WHOLE_UPDATE),
        _off_unless_lora("clip", "null", "CLIP's adapters are low-rank"),
        _off_with_dora("clip", "null", "CLIP's adapters have no magnitudes"),
    )

    kind: AdapterKind = "lora"
    """``lora``: low-rank matrices B A; ``lokr``: the Kronecker product of two small matrices;
    ``loha``: the product, value times value, of two low-rank matrices, both LyCORIS'."""
    rank: Rank = 16
    """Rank of the update."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """Scale of the update of a layer: alpha / rank of the layer."""
    ranks: AdapterRanks = AdapterRanks()
    """Other ranks for kinds of layers."""
    double_blocks: Blocks = "all"
    """Double blocks with adapters: ``all``, ``none``, or numbers from 0 and ranges, such as ``0,4-7``."""
    single_blocks: Blocks = "all"
    """Single blocks with adapters, in the same form."""
    layers: Annotated[list[LayerName], Field(max_length=13)] = []
    """Layers of those blocks with adapters, by Black Forest Labs' names without the block's, such as
    ``img_attn.qkv`` and ``linear2``; empty: all with a rank."""
    split_qkv: bool = False
    """Give queries, keys, values, and the MLP of single blocks, an adapter each instead of one for their
    fused layer."""

    dropout: Dropout = 0.0
    """Probability with which each value of A x is 0 while training; the rest is scaled up by
    1 / (1 - dropout)."""
    rank_dropout: Dropout = 0.0
    """Probability with which a sample's A x is 0 in one of its ranks, for all tokens; the rest is scaled
    up in the same way."""
    module_dropout: Dropout = 0.0
    """Probability with which a sample has no adapter in one layer; nothing is scaled. The draws of all three
    depend on ``seed``, step and sample only, so they are the same for any number of ranks; evaluations and
    sample images drop nothing."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA): each row of W + alpha / rank x B A is scaled to a norm that is
    trained too, from that of W's row on, and weight decay pulls it back to that. Training keeps the outputs
    of the layers once more."""
    lokr: LokrConfig = LokrConfig()
    """Options of ``lokr``."""
    rates: AdapterRates = AdapterRates()
    """Factors of the learning rate."""
    clip: ClipAdapterConfig | None = None
    """Adapters of the CLIP text encoder too, such as {}: its pooled vector is computed in each step, from the
    captions of ``data.images``; T5's tokens stay encoded beforehand. ``dropout`` holds for them as for the
    others. null: CLIP stays as it is."""
    base_dtype: BaseDtype = "compute"
    """Data type of the frozen weights of the blocks' linear layers: ``compute``, that of
    ``precision.compute``, or ``fp8``, e4m3 with a power of two for each row, half of bfloat16's memory. They
    are computed with in ``precision.compute``, so any GPU does; images and losses of the training are of the
    rounded weights, files and exports of the given ones."""
    initial: Path | None = None
    """Adapters to begin with, relative to the models root: a LoRA file of any layout, a run or a checkpoint;
    null: without effect at first. Another alpha is compensated; smaller ranks are filled up."""
    skip_unknown: bool = False
    """Leave out what ``initial`` has beside the layers with an adapter, and name it."""

    def __hash__(self) -> int:
        """Return a hash of all fields, one of which is a list."""
        return hash(self.model_dump_json())

    @property
    def has_dropout(self) -> bool:
        """Return whether some of the adapters' effect is dropped while training."""
        return any((self.dropout, self.rank_dropout, self.module_dropout))

    def rank_of(self, kind: str) -> int:
        """Return the rank of layers of ``kind``, a field of ``ranks``; 0 if they have no adapter."""
        rank: int | None = getattr(self.ranks, kind)
        return self.rank if rank is None else rank

    def has_layer(self, name: str) -> bool:
        """Return whether layers with ``name``, a `LayerName`, have an adapter in the selected blocks."""
        return (not self.layers or name in self.layers) and self.rank_of(kind_of(name)) > 0


class AdapterFileConfig(StrictModel):
    """The files of trained adapters that other tools load, in ``adapters/`` of the output."""

    every_steps: Annotated[int, Field(ge=0, le=10**9)] = 250
    """Steps between two files, such as lora-000250.safetensors; 0: only lora.safetensors at the end."""
    name: Annotated[
        str,
        Field(
            max_length=64,
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
            title="a file name of letters, digits, '.', '_' and '-', without a suffix",
        ),
    ] = "lora"
    """Name of the files, and title in their metadata."""
    layout: AdapterLayout = "kohya"
    """Names of the tensors: ``kohya`` is read by the most tools; ``diffusers`` is that of peft too;
    ``ai-toolkit`` is the same without peft's settings; ``bfl`` has Black Forest Labs' names, with dots."""
    dtype: AdapterDtype = "bfloat16"
    """Data type of the tensors."""


class AddedAdapter(StrictModel):
    """An adapter that is added to a model's weights."""

    path: Path
    """LoRA file of any layout, or the output or a checkpoint of a run of adapters, relative to the models
    root."""
    strength: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Factor of the update."""
    skip_unknown: bool = False
    """Leave out what the file has beside layers of the model, and name it."""


ADAPTER_RULES = (
    Rule(
        "added_adapters",
        "must be empty unless task is sample or evaluate",
        lambda run: not run.added_adapters or run.task in ("sample", "evaluate"),
        "size(self.added_adapters) == 0 || self.task in ['sample', 'evaluate']",
        others=("task",),
    ),
    Rule(
        "adapter.clip",
        "must be null unless data.images is set: CLIP is trained on captions",
        lambda run: not run.trains_clip or run.data.images is not None,
        "has(self.data) && has(self.data.images)",
    ),
    Rule(
        "adapter.clip",
        "must be null unless encoders.text is t5-clip: minilm has no CLIP",
        lambda run: not run.trains_clip or run.encoders.text == "t5-clip",
        "self.encoders.text == 't5-clip'",
        others=("encoders.text",),
    ),
)
"""Rules of RunConfig."""


def kind_of(name: str) -> str:
    """Return the kind of layers with ``name``, a `LayerName`: a field of ``adapter.ranks``."""
    first = name.partition(".")[0]
    return {"linear1": "single", "linear2": "single", "modulation": "single_mod"}.get(first, first)


def selected_blocks(text: str, count: int) -> frozenset[int]:
    """Return the blocks that ``text``, of the type `Blocks`, selects of ``count``.

    Raises ValueError naming the first block that the model does not have.
    """
    if text in ("all", "none"):
        return frozenset(range(count if text == "all" else 0))
    selected = set[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if begin > end:
            raise ValueError(f"the range {part} is empty")
        if end >= count:
            raise ValueError(f"there is no block {end}; the model has {count}, from 0")
        selected.update(range(begin, end + 1))
    return frozenset(selected)
