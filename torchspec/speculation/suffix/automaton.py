"""Suffix automata in flat int32 arrays, compiled by numba.

The automaton of a set of sequences is the smallest one that accepts their substrings (Blumer et al. 1985); a
state is a set of substrings that end at the same positions. All edges into a state carry the same token, so the
token is stored with the state. A state is one row of `nodes` (half a cache line), an edge that does not fit
into its state's row one row of the open-addressed table `slots`:

    nodes  int32 [states, 8] live: LEN LINK TOKEN COUNT CONT BEST HEAD FIRST; [states, 6] frozen: up to BEST
    slots  int32 [rows, 3] live: SRC DST NEXT; [rows, 2] frozen: SRC DST; SRC is -1 where a row is free

LEN is the state's longest substring, LINK the state of its longest suffix that lies in another state, COUNT its
occurrences and CONT those of them that are followed by another token; BEST is the most frequent child (the
smaller token on a tie). FIRST is the oldest edge, HEAD the list of the others in `slots`. A frozen
state keeps BEST in place of FIRST.

Many automata are passed as a table, one int64 row each (the T_ columns), because numba takes arrays by address.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

LEN, LINK, TOKEN, COUNT, CONT, BEST, HEAD, FIRST = range(8)
SRC, DST, NEXT = range(3)
FROZEN_WIDTH, LIVE_WIDTH = 6, 8
T_NODES, T_NODE_ROWS, T_WIDTH, T_SLOTS, T_SLOT_ROWS, T_STATES, T_EDGES = range(7)
TABLE_WIDTH = 7
COUNTED_SUFFIXES = 16
"""A live automaton counts a token for so many of the longest suffixes it ends; shorter ones are undercounted."""


def _cache_folder() -> str:
    """Return where compiled code is kept: in the user's cache, not beside the source; NUMBA_CACHE_DIR overrides it.

    numba does not notice a change in a function that another file's function calls, so the folder is named
    after the sources.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("suffix_*.py")))
    return str(Path(home) / "torchspec" / "numba" / hashlib.blake2b(sources, digest_size=8).hexdigest())


CACHE_FOLDER = _cache_folder()


def jit(function):
    """Compile on the first call and keep the code; ranks that compile at once write whole files, last one wins."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or CACHE_FOLDER
    try:
        return numba.njit(cache=True, nogil=True)(function)
    finally:
        config.CACHE_DIR = before


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


@jit
def nodes_of(table, a):
    return carray(_pointer(table[a, T_NODES]), (table[a, T_NODE_ROWS], table[a, T_WIDTH]))


@jit
def slots_of(table, a):
    width = 3 if table[a, T_WIDTH] == LIVE_WIDTH else 2
    return carray(_pointer(table[a, T_SLOTS]), (table[a, T_SLOT_ROWS], width))


@jit
def _home(s, token, rows):
    """Return the slot where an edge's search begins."""
    key = (np.uint64(s) << np.uint64(32)) | np.uint64(np.uint32(token))
    key ^= key >> np.uint64(33)
    key *= np.uint64(0xFF51AFD7ED558CCD)
    key ^= key >> np.uint64(29)
    return np.int64(((key & np.uint64(0xFFFFFFFF)) * np.uint64(rows)) >> np.uint64(32))


@jit
def child(nodes, slots, s, token):
    """Return the state after `token` in state `s`; -1: none."""
    live = nodes.shape[1] == LIVE_WIDTH
    d = nodes[s, FIRST] if live else nodes[s, BEST]
    if d < 0:
        return -1
    if nodes[d, TOKEN] == token:
        return d
    if live:
        if nodes[s, HEAD] < 0:
            return -1
    elif nodes[s, CONT] == nodes[d, COUNT]:  # every continuation is the best one
        return -1
    rows = slots.shape[0]
    at = _home(s, token, rows)
    while slots[at, SRC] >= 0:
        if slots[at, SRC] == s and nodes[slots[at, DST], TOKEN] == token:
            return slots[at, DST]
        at += 1
        if at == rows:
            at = 0
    return -1


@jit
def _place(slots, s, d, token):
    rows = slots.shape[0]
    at = _home(s, token, rows)
    while slots[at, SRC] >= 0:
        at += 1
        if at == rows:
            at = 0
    slots[at, SRC] = s
    slots[at, DST] = d
    return at


@jit
def rehash(nodes, slots, states, rows):
    """Return the live automaton's edges in a table of `rows` rows."""
    larger = np.full((rows, 3), -1, np.int32)
    for s in range(states):
        at, nodes[s, HEAD] = nodes[s, HEAD], -1
        while at >= 0:
            d = slots[at, DST]
            to = _place(larger, s, d, nodes[d, TOKEN])
            larger[to, NEXT] = nodes[s, HEAD]
            nodes[s, HEAD] = to
            at = slots[at, NEXT]
    return larger


@jit
def _add_edge(nodes, slots, size, s, d):
    """Give `s` its first edge by d's token. `size` is [states, edges in slots]; there must be room."""
    if nodes[s, FIRST] < 0:
        nodes[s, FIRST] = d
        return
    at = _place(slots, s, d, nodes[d, TOKEN])
    slots[at, NEXT] = nodes[s, HEAD]
    nodes[s, HEAD] = at
    size[1] += 1


@jit
def _redirect(nodes, slots, s, old, new):
    """Turn the edge s -> old to `new`; False: there is none."""
    found = False
    if nodes[s, FIRST] == old:
        nodes[s, FIRST] = new
        found = True
    elif nodes[s, HEAD] >= 0:
        rows = slots.shape[0]
        at = _home(s, nodes[old, TOKEN], rows)
        while slots[at, SRC] >= 0:
            if slots[at, SRC] == s and slots[at, DST] == old:
                slots[at, DST] = new
                found = True
                break
            at += 1
            if at == rows:
                at = 0
    if found and nodes[s, BEST] == old:
        nodes[s, BEST] = new
    return found


@jit
def _new_state(nodes, size, length, token):
    s = size[0]
    size[0] += 1
    nodes[s, LEN] = length
    nodes[s, LINK] = 0
    nodes[s, TOKEN] = token
    nodes[s, COUNT] = 0
    nodes[s, CONT] = 0
    nodes[s, BEST] = -1
    nodes[s, HEAD] = -1
    nodes[s, FIRST] = -1
    return s


@jit
def _split(nodes, slots, size, p, q, live):
    """Make the substrings of `q` that are no longer than LEN[p] + 1 a state of their own."""
    c = _new_state(nodes, size, nodes[p, LEN] + 1, nodes[q, TOKEN])
    nodes[c, LINK] = nodes[q, LINK]
    nodes[c, FIRST] = nodes[q, FIRST]
    if live:  # counts of a build are raw until `freeze` adds them up
        nodes[c, COUNT] = nodes[q, COUNT]
        nodes[c, CONT] = nodes[q, CONT]
        nodes[c, BEST] = nodes[q, BEST]
    at = nodes[q, HEAD]
    while at >= 0:
        _add_edge(nodes, slots, size, c, slots[at, DST])
        at = slots[at, NEXT]
    nodes[q, LINK] = c
    while p >= 0 and _redirect(nodes, slots, p, q, c):
        p = nodes[p, LINK]
    return c


@jit
def extend(nodes, slots, size, last, token, live):
    """Append `token` to the sequence that ends in state `last`; return its new state.

    There must be room for 2 states and `edges_needed` slots. Returning grown arrays from here instead would
    make the build seven times slower: numba counts references to every array that it returns.
    """
    q = child(nodes, slots, last, token)
    if q >= 0:  # another sequence has been here
        if nodes[q, LEN] == nodes[last, LEN] + 1:
            return q
        return _split(nodes, slots, size, last, q, live)
    new = _new_state(nodes, size, nodes[last, LEN] + 1, token)
    p = last
    while p >= 0 and q < 0:
        _add_edge(nodes, slots, size, p, new)
        p = nodes[p, LINK]
        if p >= 0:
            q = child(nodes, slots, p, token)
    if p >= 0:
        if nodes[q, LEN] != nodes[p, LEN] + 1:
            q = _split(nodes, slots, size, p, q, live)
        nodes[new, LINK] = q
    return new


@jit
def edges_needed(nodes, slots, last, token):
    """Return an upper bound on the slots that `extend` will fill."""
    edges = 0
    p = last
    q = child(nodes, slots, p, token)
    while q < 0:
        edges += 1
        p = nodes[p, LINK]
        if p < 0:
            return edges
        q = child(nodes, slots, p, token)
    if nodes[q, LEN] != nodes[p, LEN] + 1:
        at = nodes[q, HEAD]
        while at >= 0:
            edges += 1
            at = slots[at, NEXT]
    return edges


@jit
def has_room(slots, size, edges):
    return 4 * (size[1] + edges) <= 3 * slots.shape[0]


@jit
def build(tokens, starts):
    """Return (nodes, slots) of the frozen automaton of the sequences tokens[starts[i] : starts[i + 1]], int32."""
    total = tokens.shape[0]
    nodes = np.empty((total + total // 4 + 16, LIVE_WIDTH), np.int32)
    slots = np.full((total // 2 + 16, 3), -1, np.int32)
    size = np.zeros(2, np.int64)
    _new_state(nodes, size, 0, -1)
    nodes[0, LINK] = -1
    for i in range(starts.shape[0] - 1):
        last = 0
        for at in range(starts[i], starts[i + 1]):
            if size[0] + 2 > nodes.shape[0]:
                larger = np.empty((nodes.shape[0] + nodes.shape[0] // 2, LIVE_WIDTH), np.int32)
                larger[: size[0]] = nodes[: size[0]]
                nodes = larger
            while not has_room(slots, size, edges_needed(nodes, slots, last, tokens[at])):
                slots = rehash(nodes, slots, size[0], 2 * slots.shape[0])
            nodes[last, CONT] += 1
            last = extend(nodes, slots, size, last, tokens[at], False)
            nodes[last, COUNT] += 1
    return _freeze(nodes, slots, size[0], size[1])


@jit
def _better(nodes, a, b):
    """Whether `a` is the better child: more frequent, or as frequent with the smaller token."""
    if nodes[a, COUNT] != nodes[b, COUNT]:
        return nodes[a, COUNT] > nodes[b, COUNT]
    return nodes[a, TOKEN] < nodes[b, TOKEN]


@jit
def _add_up_counts(nodes, states):
    """Add each state's counts to its link's, longer states first. BEST counts who still has to report."""
    for s in range(states):
        nodes[s, BEST] = 0
    for s in range(1, states):
        nodes[nodes[s, LINK], BEST] += 1
    for s in range(1, states):
        t = s
        while t > 0 and nodes[t, BEST] == 0:
            nodes[t, BEST] = -1
            link = nodes[t, LINK]
            nodes[link, COUNT] += nodes[t, COUNT]
            nodes[link, CONT] += nodes[t, CONT]
            nodes[link, BEST] -= 1
            t = link


@jit
def _freeze(nodes, slots, states, edges):
    """Return exact counts and best children, in arrays without slack."""
    _add_up_counts(nodes, states)
    frozen_nodes = np.empty((states, FROZEN_WIDTH), np.int32)
    frozen_slots = np.full((edges + edges // 3 + 2, 2), -1, np.int32)
    for s in range(states):
        first, head = nodes[s, FIRST], nodes[s, HEAD]
        best = first
        at = head
        while at >= 0:
            if _better(nodes, slots[at, DST], best):
                best = slots[at, DST]
            at = slots[at, NEXT]
        if first != best:
            _place(frozen_slots, s, first, nodes[first, TOKEN])
        at = head
        while at >= 0:
            d = slots[at, DST]
            if d != best:
                _place(frozen_slots, s, d, nodes[d, TOKEN])
            at = slots[at, NEXT]
        for column in range(BEST):
            frozen_nodes[s, column] = nodes[s, column]
        frozen_nodes[s, BEST] = best
    return frozen_nodes, frozen_slots


@jit
def count_token(nodes, old, new):
    """Count the token that took a live sequence from `old` to `new` for their longest suffixes."""
    v = new
    for _ in range(COUNTED_SUFFIXES):
        if v <= 0:
            break
        nodes[v, COUNT] += 1
        v = nodes[v, LINK]
    u, v = old, new
    for _ in range(COUNTED_SUFFIXES):
        if u < 0:
            break
        nodes[u, CONT] += 1
        while nodes[nodes[v, LINK], LEN] > nodes[u, LEN]:  # until v is u's child: no search is needed
            v = nodes[v, LINK]
        if nodes[u, BEST] < 0 or _better(nodes, v, nodes[u, BEST]):
            nodes[u, BEST] = v
        u = nodes[u, LINK]


@jit
def new_live(nodes):
    """Make row 0 the root."""
    size = np.zeros(2, np.int64)
    _new_state(nodes, size, 0, -1)
    nodes[0, LINK] = -1
