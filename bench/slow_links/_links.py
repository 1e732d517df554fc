"""Network namespaces on one Linux machine, joined by links of limited rate. They need root and iproute2.

Each rank has a namespace, whose only way out is one link. A link carries both directions at once, each limited by a token bucket
(`tc tbf`); all links meet in a bridge in a namespace of its own. No namespace has a name: they end with the process that made
them and the processes inside, so nothing is left behind, and the machine's own network is never touched.
"""

import contextlib
import ctypes
import math
import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

__all__ = ["LINK", "UNLIMITED", "LinkError", "Links", "bits_per_s", "enter"]

LINK = "link0"
"""The name of the link in every namespace."""
UNLIMITED = "unlimited"
_MTU = 9000  # bytes of a packet: what switches of clusters carry
_QUEUE_BYTES = 64 << 20  # of a limited link: so many that none is dropped
_BURST_S = 0.25e-3  # what a link may send at once after a pause, as time
_CLONE_NEWNET = 0x40000000
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SETTINGS = {  # of TCP, in a namespace; a kernel that lacks one goes without
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/tcp_congestion_control": "cubic",  # bbr empties the link for 200 ms every 10 s
    "ipv4/tcp_slow_start_after_idle": "0",  # a connection is idle while a rank computes
    "ipv4/tcp_no_metrics_save": "1",  # the rate may change
    "ipv4/tcp_limit_output_bytes": "262144",  # so that a message waits little behind a long one
}
_libc = ctypes.CDLL(None, use_errno=True)


class LinkError(Exception):
    """Links cannot be made here; the message says what is missing."""


def bits_per_s(rate: str) -> float:
    """A rate such as 50mbit or 1gbit; infinite for `unlimited`. Raises LinkError."""
    if rate == UNLIMITED:
        return math.inf
    for unit, factor in _UNITS.items():
        with contextlib.suppress(ValueError):
            if rate.endswith(unit) and float(rate.removesuffix(unit)) > 0:
                return float(rate.removesuffix(unit)) * factor
    raise LinkError(f"{rate!r} is no rate: give 50mbit, 1gbit, or unlimited")


class Links:
    """`num_ranks` namespaces, joined by links of one rate, until its context ends. Raises LinkError."""

    def __init__(self, num_ranks: int, rate: str) -> None:
        self.spaces: list[int] = []
        """A descriptor of the namespace of each rank."""
        self._num_ranks, self._rate = num_ranks, rate

    def __enter__(self) -> "Links":
        try:
            self._switch = _make_space()
            _inside(self._switch, lambda: _run(f"ip link add br0 type bridge\nip link set br0 mtu {_MTU} up"))
            for rank in range(self._num_ranks):
                self.spaces.append(_make_space())
                self._join(rank)
            self.set_rate(self._rate)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    @staticmethod
    def address(rank: int) -> str:
        """That of a rank on its link."""
        return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"

    def set_rate(self, rate: str) -> None:
        """Limit every link, in both directions."""
        bits = bits_per_s(rate)
        burst = max(2 * (_MTU + 100), 0 if math.isinf(bits) else int(bits / 8 * _BURST_S))
        limit = "pfifo limit 100000" if math.isinf(bits) else f"tbf rate {rate} burst {burst} limit {_QUEUE_BYTES}"
        for rank, space in enumerate(self.spaces):
            _inside(space, partial(_run, f"tc qdisc replace dev {LINK} root {limit}"))
            _inside(self._switch, partial(_run, f"tc qdisc replace dev port{rank} root {limit}"))

    def _join(self, rank: int) -> None:
        """Lay the link of a rank from the bridge into its namespace."""
        space, port = self.spaces[rank], f"port{rank}"
        where = f"/proc/{os.getpid()}/fd/{space}"
        ends = f"ip link add {port} mtu {_MTU} type veth peer name {LINK} mtu {_MTU} netns {where}"
        _inside(self._switch, lambda: _run(f"{ends}\nip link set {port} master br0 up"))

        def set_up() -> None:
            for name, value in _SETTINGS.items():
                with contextlib.suppress(OSError):
                    Path("/proc/sys/net", name).write_text(value)
            _run(f"ip addr add {self.address(rank)}/16 dev {LINK}\nip link set {LINK} up")

        _inside(space, set_up)

    def _close(self) -> None:
        for space in (*self.spaces, *([self._switch] if hasattr(self, "_switch") else [])):
            os.close(space)
        self.spaces.clear()


def enter(space: int) -> None:
    """Move the calling thread into a namespace."""
    if _libc.setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _make_space() -> int:
    """A descriptor of a new namespace, in which the loopback is up."""
    made: list[int] = []

    def make() -> None:  # a thread can have a namespace of its own
        if _libc.unshare(_CLONE_NEWNET):
            raise LinkError(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}. Only root can.")
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        _run("ip link set lo up")

    _in_thread(make)
    return made[0]


def _inside(space: int, work: Callable[[], None]) -> None:
    def body() -> None:
        enter(space)
        work()

    _in_thread(body)


def _in_thread(work: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _run(lines: str) -> None:
    for line in lines.splitlines():
        try:
            subprocess.run(line.split(), capture_output=True, text=True, check=True)
        except FileNotFoundError:
            raise LinkError(f"there is no {line.split()[0]!r} here: install iproute2") from None
        except subprocess.CalledProcessError as error:
            raise LinkError(f"`{line}` failed: {error.stderr.strip()}") from None
