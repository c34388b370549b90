"""What a load run says: pure functions of its requests' outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval_jobs.load_client import Outcome

PERCENTILES = (50, 95, 99)


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one level of load.

    Tokens count whole answers only. ITL is the time between two pieces of an answer, TPOT the time a token after the
    first; where a piece holds several tokens the latter is the smaller. Times are in seconds.
    """
    whole = [o for o in outcomes if o.error is None]
    wall = max((o.began + o.seconds for o in outcomes), default=0.0)
    tokens = sum(o.tokens for o in whole)
    return {
        "requests": len(outcomes),
        "answered": len(whole),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        "seconds": round(wall, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall, 3) if wall else 0.0,
        "requests_per_s": round(len(whole) / wall, 4) if wall else 0.0,
        "prompt_tokens": sum(o.prompt_tokens for o in whole),
        "cached_prompt_tokens": sum(o.cached_tokens for o in whole),
        "ttft_s": percentiles(o.ttft for o in whole if o.ttft is not None),
        "itl_s": percentiles(gap for o in whole for gap in o.gaps),
        "tpot_s": percentiles(s for o in whole if (s := o.seconds_a_token) is not None),
        "request_s": percentiles(o.seconds for o in whole),
    }


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """``{"p50": …}``, or None without values."""
    found = np.fromiter(values, np.float64)
    if not len(found):
        return None
    return {f"p{p}": round(float(v), 5) for p, v in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)}


def format_table(levels: Sequence[Mapping[str, Any]]) -> str:
    """The levels for people, times in milliseconds."""
    header = f"{'load':>10} {'answered':>9} {'tok/s':>8} {'req/s':>7}"
    header += "".join(f"  {name + ' p50/95/99':>20}" for name in ("TTFT ms", "ITL ms", "TPOT ms")) + "  errors"
    lines = [header]
    for level in levels:
        load = f"{level['rate']:g}/s" if level.get("rate") else str(level["concurrency"])
        line = f"{load:>10} {level['answered']:>5}/{level['requests']:<3} {level['tokens_per_s']:>8.1f}"
        line += f" {level['requests_per_s']:>7.2f}"
        line += "".join(f"  {_milliseconds(level[name]):>20}" for name in ("ttft_s", "itl_s", "tpot_s"))
        errors = ", ".join(f"{count} {kind}" for kind, count in level["errors"].items())
        lines.append(f"{line}  {errors or '-'}")
    return "\n".join(lines)


def _milliseconds(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    return "/".join(f"{1e3 * v:.0f}" if v >= 0.1 else f"{1e3 * v:.1f}" for v in values.values())
