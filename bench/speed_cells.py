"""What rows of ``bench.speed_tables`` say of whole requests, and what the paper says of them."""

from __future__ import annotations

Row = dict

TABLE_ARMS = ("eager", "dense", "keys", "head", "group")

# CommunityKV, table 5: 32,768 tokens generated on an H200, speedup of a whole request over the paper's dense baseline.
PUBLISHED_TABLE_5 = {
    ("qwen3-4b", 65536, "head"): 1.12, ("qwen3-4b", 65536, "group"): 1.50,
    ("qwen3-4b", 131072, "head"): 1.24, ("qwen3-4b", 131072, "group"): 1.71,
    ("qwen3-8b", 65536, "head"): 1.10, ("qwen3-8b", 65536, "group"): 1.41,
    ("qwen3-8b", 131072, "head"): 1.25, ("qwen3-8b", 131072, "group"): 1.62,
    ("qwen3-14b", 65536, "head"): 1.08, ("qwen3-14b", 65536, "group"): 1.39,
    ("qwen3-14b", 131072, "head"): 1.17, ("qwen3-14b", 131072, "group"): 1.55,
}  # fmt: skip


def requests(rows: list[Row]) -> list[Row]:
    """Whole requests of table 5, a row for each model, context, arm and number of tokens; of several, the newest.

    Those of ``eager`` and ``dense`` are put together: the prefill, and the steady time of a step for every further token
    that our arms generate there. ``dense`` has eager's prefill. Seconds and ms; tokens_per_s with the prefill,
    decode_per_s without it, request_per_s with the wait for the index besides.
    """
    found: dict[tuple, Row] = {}
    for row in rows:
        if row["kind"] == "table5" and row["arm"] != "eager":
            tokens, wait = row["new_tokens"], row["index_wait_s"]
            decode_s = row["whole_s"] - row["prefill_s"]
            found[row["model"], row["context"], row["arm"], tokens] = row | {
                "whole_s": row["whole_s"], "tokens_per_s": tokens / row["whole_s"],
                "request_per_s": tokens / (row["whole_s"] + wait), "decode_per_s": (tokens - 1) / decode_s,
            }  # fmt: skip
    wanted = sorted({(model, context, tokens) for model, context, _, tokens in found})
    alone = {(row["model"], row["context"], row["new_tokens"]) for row in rows if row["kind"] == "table5"}
    for model, context, tokens in wanted or sorted(alone):
        eager = newest(rows, "table5", "eager", model, context)
        if eager is None:
            continue
        dense = newest(rows, "step", "dense", model, context)
        for arm, step in (("eager", eager), ("dense", dense)):
            if step is not None:
                decode_s = (tokens - 1) * step["median_ms"] / 1e3
                whole = eager["prefill_s"] + decode_s
                found[model, context, arm, tokens] = {
                    "model": model, "context": context, "arm": arm, "new_tokens": tokens, "index_wait_s": 0.0,
                    "prefill_s": eager["prefill_s"], "median_ms": step["median_ms"], "whole_s": whole,
                    "tokens_per_s": tokens / whole, "request_per_s": tokens / whole, "decode_per_s": (tokens - 1) / decode_s,
                    "peak_gib": eager.get("peak_gib") if arm == "eager" else None,
                }  # fmt: skip
    order = {arm: place for place, arm in enumerate(TABLE_ARMS)}
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1], key[3], order[key[2]]))]


def newest(rows: list[Row], kind: str, arm: str, model: str | None = None, context: int | None = None) -> Row | None:
    matching = [
        row for row in rows
        if (row["kind"], row.get("arm")) == (kind, arm) and model in (None, row.get("model"))
        and context in (None, row.get("context"))
    ]  # fmt: skip
    return matching[-1] if matching else None
