"""Texts without credentials."""

from __future__ import annotations

import time

import pytest

from fluxtrain.errors import redacted

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pass@example.com/a?b=c#d", "https://***@example.com/a?***"),
        ("GET https://h/a?X-Amz-Signature=0a&b=c failed", "GET https://h/a?*** failed"),
        ('{"url": "s3://key:secret@bucket/a"}', '{"url": "s3://***@bucket/a"}'),
        (f"401 for {TOKEN}.", "401 for hf_***."),
        (f"401 for ghs_{TOKEN}.", "401 for ghs_***."),
        ("with url: /b/k?X-Amz-Signature=0a (Caused by", "with url: /b/k?*** (Caused by"),
        ("https://me:p@ss@h/a", "https://***@h/a"),
        ('https://me:p"ss@h/a', "https://***@h/a"),
        ("pull //me:pass@h/a", "pull //***@h/a"),
        ("https://h/x#access_token=abc", "https://h/x#***"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("with bearer 0123456789abcdef", "with bearer ***"),
        ('{"url": "http://h", "mail": "a@b"}', '{"url": "http://h", "mail": "a@b"}'),
        ("docs/data.md#sources and a/b? c", "docs/data.md#sources and a/b? c"),
        ("key AKIAIOSFODNN7EXAMPLE", "key AKIA***"),
        ("two: http://a@b http://c?d", "two: http://***@b http://c?***"),
        ("http://example.com:8080/a@b is kept", "http://example.com:8080/a@b is kept"),
        ("hf_transfer, AKIA and what? a@b.c", "hf_transfer, AKIA and what? a@b.c"),
        ("spec.run: got 'hf://datasets/a/b@main'", "spec.run: got 'hf://datasets/a/b@main'"),
    ],
)
def test_credentials_are_hidden_and_the_rest_is_kept(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "part",
    [
        "://",
        "://a",
        "hf_",
        "a@",
        "://a@",
        "?",
        "AKIA",
        "/",
        "//",
        '//"',
        "authorization:",
        "bearer ",
    ],
)
def test_no_text_takes_long(part: str) -> None:
    start = time.perf_counter()
    redacted(part * 20_000)
    assert time.perf_counter() - start < 1
