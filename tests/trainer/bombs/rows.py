"""The table of bombs: small files that would need much memory, and what each must come to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tests.trainer.bombs import newer as n
from tests.trainer.bombs import pictures as p
from tests.trainer.bombs import tables as t
from tests.trainer.bombs import texts as x
from tests.trainer.bombs.limited import Make, Read


@dataclass(frozen=True)
class Bomb:
    """One file, and what reads it."""

    name: str
    make: Make
    read: Read
    refusal: str = ""
    """Part of the error; none: the file is read, within the bound."""
    bound_mib: int = 64
    """More memory than this is too much."""


PICTURES = [
    Bomb(f"{name}, in a folder", p.put(file, content), p.in_a_folder, *expected)
    for name, file, content, *expected in (
        ("PNG of 40,000 x 1 pixels", "a.png", partial(p.png, 40_000, 1), "a.png: 40000 x 1 pixels would be"),
        ("PNG of 1,000,000 x 64 pixels", "a.png", partial(p.png, 1_000_000, 64), "", 768),
        ("PNG of 65,000 x 600 pixels of 16 bits", "a.png", partial(p.png, 65_000, 600, bits=16), "", 448),
        ("PNG of 65,000 x 600 transparent pixels", "a.png", partial(p.png, 65_000, 600, colour=6), "", 448),
        ("PNG that claims 30,000 x 30,000", "a.png", partial(p.png, 30_000, 30_000, lines=False),
         "a.png: at most"),
        ("PNG with 128 MiB of compressed texts", "a.png", p.png_with_text, "a.png: corrupt"),
        ("GIF of 4 x 4 whose frame claims 65,535 x 65,535", "a.gif", partial(p.gif, 65_535, 65_535),
         "a.gif: at most"),
        ("GIF of 100,000 frames", "a.gif", partial(p.gif_of_frames, 100_000)),
        ("WebP that claims 16,383 x 16,383", "a.webp", partial(p.webp, 16_383), "a.webp: "),
        ("JPEG that claims 65,000 x 65,000", "a.jpg", partial(p.jpeg, 65_000, 65_000), "a.jpg: at most"),
        ("BMP that claims 11,000 x 11,000", "a.bmp", partial(p.bmp, 11_000, 11_000), "a.bmp: corrupt", 256),
        ("TIFF that claims 60,000 x 60,000", "a.tif", partial(p.tiff, 60_000, 60_000), "a.tif: at most"),
    )
]  # fmt: skip
IN_TARS = [
    Bomb("PNG of 40,000 x 1 pixels, in a tar", p.put_in_tar(partial(p.png, 40_000, 1)), p.in_a_tar),
    Bomb("PNG of 3,000 x 3,000 transparent pixels, in a tar",
         p.put_in_tar(partial(p.png, 3_000, 3_000, colour=6)), p.in_a_tar, "", 192),
    Bomb("caption of 2 GiB in a tar", x.long_caption, x.tar),
    Bomb("tar whose extension header claims 4 GiB", x.extension, x.tar, "a.tar: not a whole tar"),
    Bomb("index of a tar: 6 MiB of lists", x.sidecar, x.index, "", 192),
]  # fmt: skip
SETS = [
    Bomb(name, make, t.open_set, refusal)
    for name, make, refusal in (
        ("Arrow stream of compressed cells", t.stream("zstd", __key__=t.long_key),
         "a.arrow: not a whole Arrow stream (its cells are compressed"),
        ("Arrow stream with a key of 32 MiB for every row", t.stream(__key__=t.long_key),
         "a.arrow: column '__key__' is dictionary"),
        ("Arrow stream whose cells claim 2 GiB", t.stream(mean=t.claims), "a.arrow record 0: mean: "),
        ("parquet of 12,000,000 empty rows", t.endless_rows,
         "a.parquet: not a whole parquet file (it claims"),
        ("parquet with one cell of 80 MiB for 16 rows", t.large_entry,
         "a.parquet: not a whole parquet file (a page of"),
        ("shards of 2^61 empty samples", t.shard([1 << 61, 0], 1 << 61),
         "a.safetensors: the samples of tensor 'txt' are empty"),
    )
]  # fmt: skip
OTHER_TABLES = [
    Bomb("Arrow stream of compressed images", t.image_stream, t.open_images,
         "a.arrow: not a whole Arrow stream (its cells are compressed"),
    Bomb("state.json of 6 MiB of lists", t.state, x.saved, "state.json: not the state", 192),
    Bomb("dataset.json of 6 MiB of lists", x.listing, x.listed, "", 192),
    Bomb("safetensors header of 2 GiB", t.long_header, t.adapter, "a.safetensors: not a whole"),
    Bomb("LoRA of 4,000 tensors that share 4 MiB", t.overlapping, t.adapter,
         "a.safetensors: not a whole safetensors file (its tensors have"),
    Bomb("LoRA of 1 TiB that takes no space", t.sparse, t.adapter,
         "a.safetensors: 1099511627776 bytes, at most"),
]  # fmt: skip
CAPTIONS = [
    Bomb(f"captions: {name}", make, t.captions, *expected)
    for name, make, *expected in (
        ("parquet of 4 GiB of one text", t.metadata_parquet(t.one_text), "", 128),
        ("parquet of a text of 80 MiB", t.metadata_parquet(t.long_text, use_dictionary=False),
         "metadata.parquet: is not Parquet (a page of"),
        ("parquet of 125 MiB of texts that begin alike",
         t.metadata_parquet(t.alike_texts, use_dictionary=False,
                            column_encoding={"text": "DELTA_BYTE_ARRAY"}),
         "metadata.parquet: is not Parquet (its encoding DELTA_BYTE_ARRAY"),
        ("JSON lines of 2 GiB", x.empty("metadata.jsonl"), "metadata.jsonl: has more than"),
        ("JSON of a line of 64 MiB", x.write("metadata.jsonl", "[" * 1024, 1 << 16),
         "metadata.jsonl: line 1: a row has more than"),
        ("CSV of a row of 64 MiB", x.write("metadata.csv", 'file_name,"a\n",' * 4, 1 << 20),
         "metadata.csv: line "),
    )
]  # fmt: skip
JOBS = [
    Bomb(f"FluxTraining: {name}", make, x.job, *expected)
    for name, make, *expected in (
        ("2 GiB", x.empty("a.yaml"), "a.yaml: got '2147483648 bytes'"),
        ("120,000 lists", x.write("a.yaml", "- []\n", 120_000),
         "a.yaml line 100000, column 3: invalid YAML: more than 100000 values", 256),
        ("aliases of aliases", x.write("a.yaml", x.ALIASES), "aliases are not read"),
        ("100,000 lists in each other", x.write("a.yaml", "[", 100_000),
         "a.yaml: invalid YAML: nested too deeply"),
        ("a list as a key", x.write("a.yaml", "? [a]\n: 1\n"),
         "a.yaml line 1, column 3: invalid YAML: a key must be"),
        ("an empty integer", x.write("a.yaml", "a: !!int ''\n"), "a.yaml: invalid YAML"),
    )
]  # fmt: skip
TEXTS = [
    Bomb("caption of 2 GiB beside a picture", x.caption_beside, p.in_a_folder,
         "a.png: its caption a.txt has more"),
    Bomb("system description of aliases", x.write("a.yaml", x.ALIASES), x.system, "aliases are not read"),
    Bomb("prompt file of 2 GiB", x.empty("a.txt"), x.prompts, "a.txt: has more than"),
    Bomb("prompt file of 500,000 prompts", x.write("a.txt", "a\n", 500_000), x.prompts,
         "a.txt, line 257: at most 256 prompts", 128),
    Bomb("kohya's data set config of 2 GiB", x.empty("a.toml"), x.dataset_config, "a.toml: has more than"),
    Bomb("kohya's options: a key of 300,000 parts", x.write("a.toml", "a.", 300_000, "b = 1"), x.options,
         "a.toml: invalid TOML: a key has"),
    Bomb("benchmark.json of 2 GiB", x.empty("benchmark.json"), x.measured, "benchmark.json: has more than"),
    Bomb("tokenizer.json of 2 GiB", x.empty("tokenizer.json", beside="config.json"), x.tokenizer,
         "tokenizer.json: 2147483648 bytes"),
    Bomb("T5's config of 1,000,000,000 layers", x.many_layers, x.text_encoder, "1000000000 layers"),
]  # fmt: skip
NEWER = [
    Bomb("shard of pictures: JSON of 256 MiB", n.caption_in_json, n.unpacked),
    Bomb("table of pictures: a cell of 80 MiB", n.table(n.zeros), n.written_out, "a.parquet: "),
    Bomb("table of pictures: 250 MiB of one picture", n.table(n.one_picture), n.written_out),
    Bomb(
        "mask of 40,000 x 40,000",
        p.put("a.png", partial(p.png, 40_000, 40_000, lines=False)),
        n.mask,
        "a.png: its mask: at most",
    ),
    Bomb("base model of 12,000 tensors", n.many_tensors, n.base_model, "a.safetensors: "),
    Bomb("kohya's data sets: 40,000 tables", n.many_sets, x.dataset_config, "a.toml", 128),
    Bomb("kohya's TOML of 2 GiB", x.empty("a.toml"), n.imported, "a.toml"),
    Bomb("SimpleTuner's JSON of 6 MiB of lists", n.tuner, n.imported, "a.json", 256),
    Bomb(
        "ai-toolkit's YAML of aliases", x.write("a.yaml", x.ALIASES), n.imported, "aliases are not"
    ),
]
ROWS = [*PICTURES, *IN_TARS, *SETS, *OTHER_TABLES, *CAPTIONS, *JOBS, *TEXTS, *NEWER]
