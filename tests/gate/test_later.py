"""Values that are begun by whoever waits for them."""

from __future__ import annotations

import gc
import warnings

from whetherman_edge.gate.later import Later


async def test_it_is_begun_when_it_is_awaited_and_not_before():
    begun = []

    async def work() -> int:
        begun.append(1)
        return 7

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Later(work)
        gc.collect()
    assert (begun, said) == ([], [])
    assert await Later(work) == 7
    assert begun == [1]
