"""Options of other trainers of FLUX.1 as fields of ``spec.run``: tables, and the file that they give.

``option`` and ``reading`` are the rows and the values that they read; ``kohya``, ``variables`` and the
others are the tables; ``imported`` goes through a table and says what became of every option; ``written``
writes the file. No torch: docs/coming-from.md is generated from the same tables.
"""
