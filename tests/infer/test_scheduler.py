"""The scheduler and its pages: many requests at once give what each gives alone, no page is lost, and each comes to its turn."""

import random

import pytest

from mpar.errors import ConfigError, UnknownNameError
from mpar.infer import Engine, PagePool, Request, Sampling, Sizes
from tests.infer.cached_tokens import CachedTokens, next_token
from tests.tiers import examples


def alone(prompt: list[int], sampling: Sampling, length: int, adapter: int = 0) -> list[int]:
    """The answer of a request, token by token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (sampling.max_tokens or length) and len(tokens) < length:
        tokens.append(next_token(tokens, adapter))
        if tokens[-1] in (0, *sampling.stop_ids):
            break
    return tokens[len(prompt) :]


def check_pages(engine: Engine, sizes: Sizes) -> None:
    """Every page is free or has as many users as requests list it."""
    running = engine.scheduler.running
    for group, pool in enumerate(engine.scheduler.pools):
        used = [page for request in running if request.row // sizes.group_rows == group for page in request.pages]
        assert 0 not in used
        assert pool.num_free + len(set(used)) == sizes.pages - 1
    for request in engine.scheduler.waiting:
        assert not request.pages and request.row < 0
    assert len({request.row for request in running}) == len(running) <= sizes.rows


def attack(seed: int) -> Engine:
    """Random sizes, arrivals, lengths and cancellations."""
    draw = random.Random(seed)
    groups, page_size = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 4, 8])
    rows = groups * draw.randint(1, 6)
    length = draw.randint(8, 40)
    fewest = -(-length // page_size) + 1
    tokens = rows // groups + draw.randint(0, 12)
    sizes = Sizes(
        rows=rows,
        tokens=tokens,
        beside=draw.choice([None, draw.randint(rows // groups, tokens)]),
        pages=draw.randint(fewest, 3 * fewest),
        page_size=page_size,
        length=length,
        groups=groups,
    )
    adapters = draw.choice([(), ("a",), ("a", "b", "c")])
    engine = Engine(CachedTokens(sizes, shares_pages=draw.random() < 0.8, adapters=adapters), eos_ids=[0])
    starts = [[draw.randrange(50) for _ in range(length)] for _ in range(3)]  # prompts have beginnings in common
    requests: list[Request] = []
    cancelled: dict[Request, int] = {}
    to_come = draw.randint(1, 25)
    while to_come or not engine.is_idle:
        while to_come and draw.random() < 0.5:
            start = draw.choice(starts)[: draw.randint(0, length - 2)]
            prompt = [*start, *(draw.randrange(50) for _ in range(draw.randint(1, length - 1 - len(start))))][: length - 1]
            sampling = Sampling(max_tokens=draw.choice([None, 1, 3, 10]), stop_ids=(draw.randrange(50),))
            requests.append(engine.add(prompt, sampling, adapter=draw.choice([None, *adapters])))
            to_come -= 1
        if requests and draw.random() < 0.05:
            request = draw.choice(requests)
            if request.finish is None:
                cancelled[request] = len(request.answer)
                engine.cancel(request)
        oldest = min(engine.scheduler.running, key=requests.index, default=None)
        before = oldest and (oldest.num_cached, len(oldest.tokens))
        steps, is_idle = engine.num_steps, engine.is_idle
        engine.step()
        assert is_idle or engine.num_steps > steps, "nothing was read although a request waits"
        check_pages(engine, sizes)
        if oldest is not None and oldest.finish is None:
            assert (oldest.num_cached, len(oldest.tokens)) > before, "the oldest request must go on"
    for request in requests:
        expected = alone(request.prompt, request.sampling, length, request.adapter)
        if request in cancelled:
            assert request.answer == expected[: cancelled[request]] and request.finish == "cancelled"
        else:
            assert request.answer == expected and request.finish in ("stop", "length")
    assert {pool.num_free for pool in engine.scheduler.pools} == {sizes.pages - 1}
    return engine


def test_answers_wait_for_few_tokens_of_prompts():
    """A prompt alone is read in one step; beside an answer, which goes on in each, in steps of at most `beside` tokens."""
    engine = Engine(CachedTokens(Sizes(rows=2, tokens=64, beside=9, page_size=4, length=64)))
    first = engine.add(list(range(20, 60)), Sampling(max_tokens=9, ignore_eos=True))
    assert [(turn.start, turn.end) for turn in engine.scheduler.next_turns()] == [(0, 40)]
    engine.scheduler.finish_turns([])
    engine.step()
    second = engine.add(list(range(60, 90)), Sampling(max_tokens=1))
    lengths = []
    while second.finish is None:
        before = second.num_cached, len(first.answer)
        engine.step()
        assert len(first.answer) == before[1] + 1
        lengths.append(min(second.num_cached, 30) - before[0] if second.row >= 0 else 30 - before[0])
    assert lengths == [8, 8, 8, 6]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_default_cache_can_be_divided(ranks):
    """Every small number of ranks along cp divides its pages evenly."""
    assert Sizes().pages % ranks == 0


def test_requests_get_what_each_gets_alone():
    """Whatever arrives, ends and is given up: right tokens, no page lost or used twice, and the oldest always goes on."""
    engines = [attack(seed) for seed in range(examples(2000))]
    assert any(engine.scheduler.num_preempted for engine in engines)


def test_a_common_beginning_is_computed_once():
    """The second prompt reads only what the first did not have, and at least its last token; forgetting ends that."""
    sizes = Sizes(rows=2, tokens=64, pages=33, page_size=4, length=64)
    engine = Engine(CachedTokens(sizes))
    first = engine.add(list(range(12)), Sampling(max_tokens=2))
    list(engine.run())
    second = engine.add([*range(10), 44], Sampling(max_tokens=2))
    same = engine.add(list(range(12)), Sampling(max_tokens=2))
    list(engine.run())
    assert (first.num_shared, second.num_shared, same.num_shared) == (0, 8, 8)
    engine.scheduler.pools[0].forget()
    third = engine.add([*range(12), 1], Sampling(max_tokens=2))
    list(engine.run())
    assert third.num_shared == 0
    assert third.answer == alone(third.prompt, third.sampling, 64)


def test_adapters_share_no_pages():
    """An equal prompt finds only what was computed with its own adapter, or without any."""
    engine = Engine(CachedTokens(Sizes(rows=2, tokens=64, pages=33, page_size=4, length=64), adapters=("a", "b")))
    for _ in range(2):
        for adapter in (None, "a", "b"):
            engine.add(list(range(12)), Sampling(max_tokens=2), adapter=adapter)
    requests = [*engine.scheduler.waiting]
    list(engine.run())
    assert [request.num_shared for request in requests] == [0, 0, 0, 8, 8, 8]
    assert [r.answer for r in requests] == [alone(r.prompt, r.sampling, 64, r.adapter) for r in requests]


def test_unknown_adapters_are_refused():
    """With the nearest name that there is."""
    engine = Engine(CachedTokens(Sizes(rows=1, tokens=8, pages=6, page_size=8, length=40), adapters=("french", "sql")))
    with pytest.raises(UnknownNameError, match="adapter 'frenhc': there is no such one; nearest: french"):
        engine.add([1], Sampling(), adapter="frenhc")
    assert engine.is_idle


def test_an_answer_is_found_by_the_next_question():
    """A chat's next prompt begins with the answer, whose full pages are still there."""
    engine = Engine(CachedTokens(Sizes(rows=1, tokens=64, pages=33, page_size=4, length=64)))
    first = engine.add([1, 2, 3], Sampling(max_tokens=14))
    list(engine.run())
    second = engine.add([*first.tokens, 9], Sampling(max_tokens=1))
    list(engine.run())
    assert second.num_shared == 16


def test_pages_are_reused_oldest_first():
    """A page that was released long ago is overwritten before one that was released just now, and the last page of a prompt
    before its first."""
    pool = PagePool(4, 2)
    pages = [pool.take() for _ in range(3)]
    tokens, parent = [5, 6, 7, 8, 9, 9], 0
    for index, page in enumerate(pages):
        parent = pool.remember(page, parent, tokens, index)
    pool.release(pages)
    assert [page for page, _ in pool.share(tokens, 6)] == pages
    pool.release(pages)
    assert pool.take() == pages[-1]
    assert [page for page, _ in pool.share(tokens, 6)] == pages[:2]


@pytest.mark.parametrize("prompt", [[], list(range(40))], ids=["empty", "too long"])
def test_prompts_that_do_not_fit_are_refused(prompt):
    """A prompt without tokens, or without room for an answer, is refused at once."""
    engine = Engine(CachedTokens(Sizes(rows=1, tokens=8, pages=6, page_size=8, length=64)))
    with pytest.raises(ConfigError, match="between 1 and 39 fit"):
        engine.add(prompt, Sampling())
    assert engine.is_idle


def test_sizes_that_do_not_fit_each_other_are_refused():
    """All of them are named."""
    with pytest.raises(ConfigError, match="beside=9 is more than tokens=8"):
        Sizes(rows=4, tokens=8, beside=9)
    with pytest.raises(ConfigError) as raised:
        Sizes(rows=4, tokens=2, beside=3, pages=1, page_size=0)
    assert all(name in str(raised.value) for name in ("tokens=2", "beside=3", "pages=1", "page_size=0"))
