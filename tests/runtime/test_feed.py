"""The feed: batches in their order, made ahead in another thread; what fails there is raised here; nothing hangs."""

import threading
import time

import pytest
import torch

from tpu_experiments.config.data_schema import LoaderConfig
from tpu_experiments.runtime.feed import Prefetcher

pytestmark = [pytest.mark.xla, pytest.mark.timeout(60)]
SMALL = LoaderConfig(loader_prefetch_size=1, device_prefetch_size=1)
SETTINGS = {
    "smallest": SMALL,
    "default": LoaderConfig(),
    "three_threads": LoaderConfig(loader_prefetch_size=2, device_prefetch_size=3, host_to_device_transfer_threads=3),
}


@pytest.fixture(params=["eager", "xla"])
def runtime(request, make_config):
    from tpu_experiments.runtime.processes.launch import make_runtime

    return make_runtime(make_config(f"hw.runtime={request.param}"))


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def settings(request):
    return request.param


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert [t for t in threading.enumerate() if t not in before and t.is_alive() and feeds(t)] == []


def feeds(thread):
    """Threads of the feed and of torch_xla's loader; not the one that runs step closures, which stays."""
    return thread.name == "feed" or "_worker" in thread.name


def host_batch(number):
    return {"ids": torch.full((2, 4, 3), number, dtype=torch.int32), "lr": torch.tensor([number / 7])}


def source(count, *, fails_at=None, made=None):
    for number in range(count):
        if number == fails_at:
            raise OSError(f"disk gone at {number}")
        if made is not None:
            made.append(threading.get_ident())
        yield f"info {number}", host_batch(number)


def numbers(feed):
    seen = []
    for info, batch in feed:
        number = int(batch["ids"][0, 0, 0].cpu())
        assert info == f"info {number}"
        torch.testing.assert_close(batch["lr"].cpu(), torch.tensor([number / 7]), rtol=0, atol=0)
        seen.append(number)
    return seen


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_batch_arrives_once_and_in_order(runtime, settings, count):
    with runtime.feed(source(count), rows_dim=1, settings=settings) as feed:
        assert numbers(feed) == list(range(count))
        assert next(feed, "ended") == "ended"


def test_batches_are_on_the_device_in_the_form_that_put_gives(runtime):
    expected = runtime.put(host_batch(0), rows_dim=1)
    with runtime.feed(source(1), rows_dim=1, settings=SMALL) as feed:
        ((_, batch),) = feed
    assert {name: (t.device, t.dtype, t.shape) for name, t in batch.items()} == {
        name: (t.device, t.dtype, t.shape) for name, t in expected.items()
    }


def test_batches_are_made_in_another_thread_and_ahead_but_not_without_end(runtime, settings):
    made = []
    with runtime.feed(source(1000, made=made), rows_dim=1, settings=settings) as feed:
        next(feed)
        deadline = time.monotonic() + 10
        while len(made) <= settings.loader_prefetch_size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        # A transfer thread of torch_xla holds as many batches as its device queue, and one waits for room.
        ahead = settings.loader_prefetch_size + 2 * settings.device_prefetch_size + 2
        assert settings.loader_prefetch_size < len(made) <= 1 + ahead * settings.host_to_device_transfer_threads
    assert threading.get_ident() not in made[1:]


@pytest.mark.parametrize("fails_at", [0, 1, 5, 40])
def test_an_exception_of_the_source_is_raised_after_the_batches_before_it(runtime, settings, fails_at):
    seen = []

    def consume():
        with runtime.feed(source(100, fails_at=fails_at), rows_dim=1, settings=settings) as feed:
            seen.extend(int(batch["ids"][0, 0, 0].cpu()) for _, batch in feed)

    with pytest.raises(OSError, match=f"disk gone at {fails_at}"):
        consume()
    assert seen == list(range(fails_at))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_consumer_that_stops_early_ends_the_threads(runtime, settings, error):
    def consume():
        with runtime.feed(source(10**9), rows_dim=1, settings=settings) as feed:
            for _ in range(3):
                next(feed)
            raise error

    with pytest.raises(error):
        consume()


def test_leaving_without_taking_a_batch_ends_the_threads(runtime, settings):
    with runtime.feed(source(10**9), rows_dim=1, settings=settings):
        pass


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_end(make_config, settings):
    from tpu_experiments.runtime.processes.launch import make_runtime

    def batches():
        for number in range(10**9):
            info, batch = f"info {number}", host_batch(number)
            yield info, batch | ({"ids": batch["ids"].to_sparse()} if number == 30 else {})

    seen = []

    def consume():
        with make_runtime(make_config()).feed(batches(), rows_dim=1, settings=settings) as feed:
            seen.extend(int(batch["ids"][0, 0, 0].cpu()) for _, batch in feed)

    with pytest.raises(RuntimeError, match="only supports"):
        consume()
    assert seen == list(range(len(seen)))
    assert len(seen) <= 30


def test_ahead_makes_no_more_than_its_size():
    made = []
    ahead = Prefetcher((made.append(i) or i for i in range(100)), size=4)
    assert next(ahead) == 0
    time.sleep(0.2)
    assert len(made) == 5
    assert list(ahead) == list(range(1, 100))
    ahead.close()
    ahead.close()
