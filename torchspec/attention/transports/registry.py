"""The transports there are. To add one, write a `Transport` in a file of this folder and add its line."""

from __future__ import annotations

from torchspec.attention.transports.base import Transport
from torchspec.attention.transports.gather import Gather
from torchspec.attention.transports.query_ring import QueryRing
from torchspec.attention.transports.ring import Ring

TRANSPORTS: dict[str, Transport] = {}


def register_transport(transport: Transport) -> None:
    """Add a transport, also from outside this package.

    Raises:
        ValueError: the name is taken.
    """
    if transport.name in ("auto", *TRANSPORTS):
        raise ValueError(f"transport {transport.name!r} is already registered; choose another name")
    TRANSPORTS[transport.name] = transport


def get_transport(name: str) -> Transport:
    """Return the transport of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; it must be one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


# Where two transports send the same, `choose_transport` takes the first.
register_transport(Gather())
register_transport(Ring())
register_transport(QueryRing())
