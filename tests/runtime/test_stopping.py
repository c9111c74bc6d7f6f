"""Processes that ask whether to stop, at moments of their own, all stop at the same point of their work."""

import multiprocessing
import os
import random
import time

from tpu_experiments.runtime.processes.stopping import SharedRequest, Ticket

NUM_PROCESSES, MAX_SECONDS = 4, 60.0


def work(ticket: Ticket, rank: int, asks_at: int | None, stopped: "multiprocessing.Queue[tuple[int, int]]") -> None:
    """Points of work of uneven length; one process asks all to stop at one of them."""
    request, rng = SharedRequest.of(ticket), random.Random(rank)
    point, ends = 0, time.monotonic() + MAX_SECONDS
    while time.monotonic() < ends:
        point += 1
        time.sleep(rng.random() * 0.002)
        if point == asks_at:
            request.request()
        if request.agreed(rank):
            stopped.put((rank, point))
            return
    stopped.put((rank, 0))


def test_all_stop_at_the_same_point() -> None:
    context = multiprocessing.get_context("spawn")  # not fork: this process may have threads of jax
    for trial in range(3):
        file = os.memfd_create("test")
        ticket, stopped = Ticket(os.getpid(), file), context.Queue()
        SharedRequest(file)
        asks = [3 + 50 * trial if rank == trial % NUM_PROCESSES else None for rank in range(NUM_PROCESSES)]
        processes = [
            context.Process(target=work, args=(ticket, rank, asks_at, stopped)) for rank, asks_at in enumerate(asks)
        ]
        for process in processes:
            process.start()
        points = {rank: point for rank, point in (stopped.get(timeout=2 * MAX_SECONDS) for _ in processes)}
        for process in processes:
            process.join()
        os.close(file)
        assert len(points) == NUM_PROCESSES
        (point,) = set(points.values())
        assert point >= 3 + 50 * trial


def test_one_process_stops_where_it_asks() -> None:
    file = os.memfd_create("test")
    request = SharedRequest(file)
    assert not request.agreed(0)
    request.request()
    assert request.agreed(0)
    assert not request.agreed(0)
    os.close(file)


def test_who_has_passed_a_point_is_met_at_the_next() -> None:
    file = os.memfd_create("test")
    request = SharedRequest(file)
    assert [request.agreed(1) for _ in range(3)] == [False] * 3
    request.request()
    assert [request.agreed(0) for _ in range(4)] == [False, False, False, True]
    assert request.agreed(1)
    os.close(file)
