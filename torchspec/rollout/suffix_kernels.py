"""Suffix automata in flat int32 arrays, compiled by numba: build, freeze, append, follow, propose.

The automaton of a set of sequences is the smallest one that accepts their substrings (Blumer et al. 1985); a
state is a set of substrings that end at the same positions. All edges into a state carry the same token, so the
token is stored with the state. A state is one row of `nodes` (half a cache line), an edge that does not fit
into its state's row one row of the open-addressed table `slots`:

    nodes  int32 [states, 8] live: LEN LINK TOKEN COUNT CONT BEST HEAD FIRST; [states, 6] frozen: up to BEST
    slots  int32 [rows, 3] live: SRC DST NEXT; [rows, 2] frozen: SRC DST; SRC is -1 where a row is free

LEN is the state's longest substring, LINK the state of its longest suffix that lies in another state, COUNT its
occurrences and CONT those of them that are followed by another token; BEST is the most frequent child (the
smaller token on a tie). FIRST is the edge that was made first, HEAD the list of the others in `slots`. A frozen
state keeps BEST in place of FIRST.

Many automata are passed as a table, one int64 row each (the T_ columns), because numba takes arrays by address.
"""

from __future__ import annotations

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
SELF, GROUP, PROBLEM = range(3)
"""Columns of a request's scopes: its own text, its siblings', then the problem's generations, newest first."""
COUNTED_SUFFIXES = 16
"""A live automaton counts a token for so many of the longest suffixes it ends; shorter ones are undercounted."""
MAX_WALKS = 4
"""Scopes a request's draft is looked for in, longest match first."""
CELLS = (3, 8, 8, 6)
"""Calibration by scope, match length, support and depth; all but the scope in powers of two."""
PRIOR, PRIOR_WEIGHT = 0.5, 1.0
TRUST = 4.0
"""Predicted acceptances a cell needs before its observations weigh as much as the counts."""
LARGEST_PROBABILITY = 0.999


def _cache_folder() -> str:
    """Compiled code is kept in the user's cache, never beside the source; NUMBA_CACHE_DIR overrides it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(home) / "torchspec" / "numba")


def _njit(function):
    """Compile on the first call and keep the code; ranks that compile at once write whole files, last one wins."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or _cache_folder()
    try:
        return numba.njit(cache=True, nogil=True)(function)
    finally:
        config.CACHE_DIR = before


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


@_njit
def _nodes(table, a):
    return carray(_pointer(table[a, T_NODES]), (table[a, T_NODE_ROWS], table[a, T_WIDTH]))


@_njit
def _slots(table, a):
    width = 3 if table[a, T_WIDTH] == LIVE_WIDTH else 2
    return carray(_pointer(table[a, T_SLOTS]), (table[a, T_SLOT_ROWS], width))


@_njit
def _home(s, token, rows):
    """The slot where an edge's search begins."""
    key = (np.uint64(s) << np.uint64(32)) | np.uint64(np.uint32(token))
    key ^= key >> np.uint64(33)
    key *= np.uint64(0xFF51AFD7ED558CCD)
    key ^= key >> np.uint64(29)
    return np.int64(((key & np.uint64(0xFFFFFFFF)) * np.uint64(rows)) >> np.uint64(32))


@_njit
def child(nodes, slots, s, token):
    """The state after `token` in state `s`; -1: none."""
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


@_njit
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


@_njit
def rehash(nodes, slots, states, rows):
    """The live automaton's edges in a table of `rows` rows."""
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


@_njit
def _add_edge(nodes, slots, size, s, d):
    """Give `s` its first edge by d's token. `size` is [states, edges in slots]; there must be room."""
    if nodes[s, FIRST] < 0:
        nodes[s, FIRST] = d
        return
    at = _place(slots, s, d, nodes[d, TOKEN])
    slots[at, NEXT] = nodes[s, HEAD]
    nodes[s, HEAD] = at
    size[1] += 1


@_njit
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


@_njit
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


@_njit
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


@_njit
def _extend(nodes, slots, size, last, token, live):
    """Append `token` to the sequence that ends in state `last`; returns its new state.

    There must be room for 2 states and `_edges_needed` slots. Returning grown arrays from here instead would
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


@_njit
def _edges_needed(nodes, slots, last, token):
    """An upper bound on the slots that `_extend` will fill."""
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


@_njit
def _has_room(slots, size, edges):
    return 4 * (size[1] + edges) <= 3 * slots.shape[0]


@_njit
def build(tokens, starts):
    """The frozen automaton of the sequences tokens[starts[i] : starts[i + 1]], int32; returns (nodes, slots)."""
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
            while not _has_room(slots, size, _edges_needed(nodes, slots, last, tokens[at])):
                slots = rehash(nodes, slots, size[0], 2 * slots.shape[0])
            nodes[last, CONT] += 1
            last = _extend(nodes, slots, size, last, tokens[at], False)
            nodes[last, COUNT] += 1
    return _freeze(nodes, slots, size[0], size[1])


@_njit
def _better(nodes, a, b):
    """Whether `a` is the better child: more frequent, or as frequent with the smaller token."""
    if nodes[a, COUNT] != nodes[b, COUNT]:
        return nodes[a, COUNT] > nodes[b, COUNT]
    return nodes[a, TOKEN] < nodes[b, TOKEN]


@_njit
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


@_njit
def _freeze(nodes, slots, states, edges):
    """Exact counts, best children, and arrays without slack."""
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


@_njit
def _count(nodes, old, new):
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


@_njit
def new_live(nodes):
    """Make row 0 the root."""
    size = np.zeros(2, np.int64)
    _new_state(nodes, size, 0, -1)
    nodes[0, LINK] = -1


@_njit
def append(table, automata, states, rows, scope, tokens, starts, done):
    """Append each request's new tokens to its live automaton of one scope.

    `done[i]` counts the tokens of request i that are in. Returns -1 when all are, or the automaton that
    needs more room; give it more and call again.
    """
    for i in range(rows.shape[0]):
        r = rows[i]
        a = automata[r, scope]
        if a < 0:
            continue
        nodes, slots = _nodes(table, a), _slots(table, a)
        size = table[a, T_STATES : T_EDGES + 1]
        while done[i] < starts[i + 1] - starts[i]:
            token = tokens[starts[i] + done[i]]
            last = states[r, scope]
            edges = _edges_needed(nodes, slots, last, token)
            if size[0] + 2 > nodes.shape[0] or not _has_room(slots, size, edges):
                return a
            new = _extend(nodes, slots, size, last, token, True)
            _count(nodes, last, new)
            states[r, scope] = new
            done[i] += 1
    return -1


@_njit
def follow(table, automata, states, matches, r, tokens):
    """Move request r's cursors in its frozen automata over `tokens`, newest generation first."""
    for scope in range(PROBLEM, automata.shape[1]):
        a = automata[r, scope]
        if a < 0:
            break
        nodes, slots = _nodes(table, a), _slots(table, a)
        s, m = states[r, scope], matches[r, scope]
        for token in tokens:
            d = child(nodes, slots, s, token)
            while d < 0 and s > 0:
                s = nodes[s, LINK]
                m = nodes[s, LEN]
                d = child(nodes, slots, s, token)
            if d >= 0:
                s = d
                m += 1
        states[r, scope] = s
        matches[r, scope] = m


@_njit
def follow_all(table, automata, states, matches, rows, tokens, starts, recent):
    """`follow` for a batch; `recent` [rows, n] keeps each request's last n tokens, newest last."""
    width = recent.shape[1]
    for i in range(rows.shape[0]):
        r = rows[i]
        new = tokens[starts[i] : starts[i + 1]]
        follow(table, automata, states, matches, r, new)
        n = min(new.shape[0], width)
        recent[r, : width - n] = recent[r, n:].copy()
        recent[r, width - n :] = new[new.shape[0] - n :]


@_njit
def _log2_bucket(n, buckets):
    bucket = 0
    while n > 0 and bucket < buckets - 1:
        n >>= 1
        bucket += 1
    return bucket


@_njit
def _walk(nodes, s, m, kind, weight, limit, floor, factors, tokens, probs, plain, cells):
    """Follow the most frequent continuation; returns the tokens' number and expected acceptances."""
    path, expected, j = weight, 0.0, 0
    while j < limit:
        d = nodes[s, BEST]
        while d < 0 and s > 0:  # a sequence ends here: go on with a shorter context
            s = nodes[s, LINK]
            m = nodes[s, LEN]
            d = nodes[s, BEST]
        if s <= 0:
            break
        support = max(nodes[s, CONT], 1)
        p = (min(nodes[d, COUNT], support) + PRIOR_WEIGHT * PRIOR) / (support + PRIOR_WEIGHT)
        cell = (kind * CELLS[1] + _log2_bucket(m, CELLS[1])) * CELLS[2] + _log2_bucket(support, CELLS[2])
        cell = cell * CELLS[3] + _log2_bucket(j, CELLS[3])
        path *= min(p * factors[cell], LARGEST_PROBABILITY)
        if path < floor:
            break
        tokens[j] = nodes[d, TOKEN]
        probs[j] = path
        plain[j] = p
        cells[j] = cell
        expected += path
        s = d
        m += 1
        j += 1
    return j, expected


@_njit
def propose(
    table,
    automata,
    states,
    matches,
    weights,
    factors,
    rows,
    limits,
    floors,
    drafts,
    probs,
    plain,
    cells,
    lengths,
):
    """Each request's draft: of its scopes with the longest matches, the one with most expected acceptances.

    A token is proposed while there are less than limits[i] and its path probability is at least floors[i].
    Writes rows of drafts, probs (path probabilities), plain (uncalibrated conditional ones), cells and lengths.
    """
    width = drafts.shape[1]
    walked = np.empty(automata.shape[1], np.bool_)
    new_tokens, new_cells = np.empty(width, np.int32), np.empty(width, np.int32)
    new_probs, new_plain = np.empty(width, np.float32), np.empty(width, np.float32)
    for i in range(rows.shape[0]):
        r = rows[i]
        lengths[r] = 0
        limit = min(limits[i], width)
        if limit <= 0:
            continue
        scopes = PROBLEM
        while scopes < automata.shape[1] and automata[r, scopes] >= 0:
            scopes += 1
        for scope in range(PROBLEM):  # the longest suffix of a live sequence that was seen before
            matches[r, scope] = 0
            if automata[r, scope] >= 0:
                nodes = _nodes(table, automata[r, scope])
                s = states[r, scope]
                while s > 0 and nodes[s, CONT] == 0:
                    s = nodes[s, LINK]
                matches[r, scope] = nodes[s, LEN]
        walked[:scopes] = False
        best = 0.0
        for _ in range(MAX_WALKS):
            chosen, longest = -1, 0
            for scope in range(scopes):
                if not walked[scope] and matches[r, scope] > longest:
                    chosen, longest = scope, matches[r, scope]
            if chosen < 0:
                break
            walked[chosen] = True
            nodes = _nodes(table, automata[r, chosen])
            n, expected = _walk(
                nodes, states[r, chosen], longest, min(chosen, PROBLEM), weights[chosen], limit, floors[i],
                factors, new_tokens, new_probs, new_plain, new_cells,
            )  # fmt: skip
            if expected > best:
                best = expected
                lengths[r] = n
                drafts[r, :n] = new_tokens[:n]
                probs[r, :n] = new_probs[:n]
                plain[r, :n] = new_plain[:n]
                cells[r, :n] = new_cells[:n]


@_njit
def pack(rows, drafts, probs, lengths, starts, out_tokens, out_probs):
    """The drafts of `rows` as one flat array; fills starts [rows + 1]."""
    starts[0] = 0
    for i in range(rows.shape[0]):
        r, at = rows[i], starts[i]
        n = lengths[r]
        out_tokens[at : at + n] = drafts[r, :n]
        out_probs[at : at + n] = probs[r, :n]
        starts[i + 1] = at + n


@_njit
def calibrate(rows, tokens, starts, drafts, plain, cells, lengths, predicted, accepted, factors):
    """Compare the last drafts with the tokens that came: what was predicted, what would have been accepted.

    A token after the first mismatch was not tried. Tokens that the budget cut off count as far as they can be
    compared, so a drafter that is switched off goes on learning.
    """
    for i in range(rows.shape[0]):
        r = rows[i]
        for j in range(min(lengths[r], starts[i + 1] - starts[i])):
            cell = cells[r, j]
            predicted[cell] += plain[r, j]
            hit = drafts[r, j] == tokens[starts[i] + j]
            if hit:
                accepted[cell] += 1.0
            factors[cell] = (accepted[cell] + TRUST) / (predicted[cell] + TRUST)
            if not hit:
                break
        lengths[r] = 0
