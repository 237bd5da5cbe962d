"""Caches may hold more than 2**31 elements: offsets into K and V are computed in 64 bits, in every template."""

import re
from pathlib import Path

import pytest

import ckv_compile.templates

TEMPLATES = sorted(Path(ckv_compile.templates.__path__[0]).glob("*.jinja"))
# A factor, with what it is indexed by and cast to, times a stride of K or V over rows, heads or tokens.
OFFSET = re.compile(r"([\w)\]]+(?:\[[^\]]*\])?(?:\.to\([\w.]+\))?)\s*\*\s*(stride_[kv][zhn])\b")


def _is_wide(factor: str, stride: str, text: str) -> bool:
    name = re.match(r"\w+", factor)
    return (
        factor.endswith(".to(tl.int64)")
        or re.search(rf"\b{stride} = tl\.full\(\[\], .*, tl\.int64\)", text) is not None
        or (name is not None and _assigned_in_64_bits(name.group(), text))
    )


def _assigned_in_64_bits(name: str, text: str) -> bool:
    """Whether the last word on a name, before it is an offset, is 64 bits wide."""
    values = re.findall(rf"^\s*{name} = (.*)$", text, re.MULTILINE)
    return any(".to(tl.int64)" in value for value in values)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_offsets_into_keys_and_values_have_64_bits(path):
    text = path.read_text()
    narrow = [match.group() for match in OFFSET.finditer(text) if not _is_wide(match.group(1), match.group(2), text)]
    assert not narrow


def test_the_check_sees_a_narrow_offset():
    assert OFFSET.search("KEY + kv_head * stride_kh") is not None
    assert not _is_wide("kv_head", "stride_kh", "kv_head = head // 2\n x = kv_head * stride_kh")
    assert not _is_wide("position[:, None]", "stride_kn", "    position = at + lane")
    assert _is_wide("position[:, None]", "stride_kn", "    position = (at + lane).to(tl.int64)")
    assert sum(len(OFFSET.findall(path.read_text())) for path in TEMPLATES) > 30
