"""The suffix drafter's step, compiled by numba: all requests' tokens in, all requests' drafts out.

Requests are rows of arrays; `rows` [B] names those of the batch. `automata`, `states` and `matches` [rows, scopes]
say which automaton a request has in each scope, its state there, and the length of the match. Ragged tokens are
flat arrays with `starts` [B + 1].
"""

from __future__ import annotations

import numpy as np

from torchspec.speculation.suffix.automaton import (
    BEST,
    CONT,
    COUNT,
    LEN,
    LINK,
    T_EDGES,
    T_STATES,
    TOKEN,
    child,
    count_token,
    edges_needed,
    extend,
    has_room,
    jit,
    nodes_of,
    slots_of,
)

SELF, GROUP, PROBLEM = range(3)
"""Columns of a request's scopes: its own text, its siblings', then the problem's generations, newest first."""
MAX_WALKS = 4
"""Scopes a request's draft is looked for in, longest match first."""
CELLS = (3, 8, 8, 6)
"""Calibration by scope, match length, support and depth; all but the scope in powers of two."""
PRIOR, PRIOR_WEIGHT = 0.5, 1.0
TRUST = 4.0
"""Predicted acceptances a cell needs before its observations weigh as much as those of its whole scope, and a scope
before its observations weigh as much as the counts."""
LARGEST_PROBABILITY = 0.999


@jit
def append(table, automata, states, rows, scope, tokens, starts, done):
    """Append each request's new tokens to its live automaton of one scope.

    `done[i]` counts the tokens of request i that are in. Return -1 when all are, or the automaton that
    needs more room; give it more and call again.
    """
    for i in range(rows.shape[0]):
        r = rows[i]
        a = automata[r, scope]
        if a < 0:
            continue
        nodes, slots = nodes_of(table, a), slots_of(table, a)
        size = table[a, T_STATES : T_EDGES + 1]
        while done[i] < starts[i + 1] - starts[i]:
            token = tokens[starts[i] + done[i]]
            last = states[r, scope]
            edges = edges_needed(nodes, slots, last, token)
            if size[0] + 2 > nodes.shape[0] or not has_room(slots, size, edges):
                return a
            new = extend(nodes, slots, size, last, token, True)
            count_token(nodes, last, new)
            states[r, scope] = new
            done[i] += 1
    return -1


@jit
def _move(nodes, slots, s, m, tokens):
    """Return the longest match's state and length after `tokens`."""
    for token in tokens:
        d = child(nodes, slots, s, token)
        while d < 0 and s > 0:
            s = nodes[s, LINK]
            m = nodes[s, LEN]
            d = child(nodes, slots, s, token)
        if d >= 0:
            s = d
            m += 1
    return s, m


@jit
def follow(table, automata, states, matches, r, tokens):
    """Move request r's cursors in its frozen automata over `tokens`, newest generation first."""
    for scope in range(PROBLEM, automata.shape[1]):
        a = automata[r, scope]
        if a < 0:
            break
        s, m = _move(nodes_of(table, a), slots_of(table, a), states[r, scope], matches[r, scope], tokens)
        states[r, scope] = s
        matches[r, scope] = m


@jit
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


@jit
def _log2_bucket(n, buckets):
    bucket = 0
    while n > 0 and bucket < buckets - 1:
        n >>= 1
        bucket += 1
    return bucket


@jit
def _walk(nodes, s, m, kind, weight, limit, floor, factors, tokens, probs, plain, cells):
    """Follow the most frequent continuation; return the number of tokens and of expected acceptances."""
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


@jit
def propose(
    table,
    automata,
    states,
    matches,
    weights,
    factors,
    rows,
    given,
    given_starts,
    limits,
    floors,
    drafts,
    probs,
    plain,
    cells,
    lengths,
):
    """Write each request's draft: of its scopes with the longest matches, the one with most expected acceptances.

    A token is proposed while there are less than limits[i] and its path probability is at least floors[i].
    The draft follows the request's text and its `given` tokens, ragged, which no cursor keeps. Writes rows of
    drafts, probs (path probabilities), plain (uncalibrated conditional ones), cells and lengths.
    """
    width = drafts.shape[1]
    walked = np.empty(automata.shape[1], np.bool_)
    at, longest_match = np.empty(automata.shape[1], np.int32), np.empty(automata.shape[1], np.int32)
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
                nodes = nodes_of(table, automata[r, scope])
                s = states[r, scope]
                while s > 0 and nodes[s, CONT] == 0:
                    s = nodes[s, LINK]
                at[scope] = s
                matches[r, scope] = nodes[s, LEN]
        at[PROBLEM:scopes] = states[r, PROBLEM:scopes]
        longest_match[:scopes] = matches[r, :scopes]
        new = given[given_starts[i] : given_starts[i + 1]]
        if new.shape[0]:
            for scope in range(scopes):
                a = automata[r, scope]
                if a >= 0:
                    at[scope], longest_match[scope] = _move(
                        nodes_of(table, a), slots_of(table, a), at[scope], longest_match[scope], new
                    )
        walked[:scopes] = False
        best = 0.0
        for _ in range(MAX_WALKS):
            chosen, longest = -1, 0
            for scope in range(scopes):
                if not walked[scope] and longest_match[scope] > longest:
                    chosen, longest = scope, longest_match[scope]
            if chosen < 0:
                break
            walked[chosen] = True
            nodes = nodes_of(table, automata[r, chosen])
            n, expected = _walk(
                nodes, at[chosen], longest, min(chosen, PROBLEM), weights[chosen], limit, floors[i],
                factors, new_tokens, new_probs, new_plain, new_cells,
            )  # fmt: skip
            if expected > best:
                best = expected
                lengths[r] = n
                drafts[r, :n] = new_tokens[:n]
                probs[r, :n] = new_probs[:n]
                plain[r, :n] = new_plain[:n]
                cells[r, :n] = new_cells[:n]


@jit
def pack(rows, drafts, probs, lengths, starts, out_tokens, out_probs):
    """Write the drafts of `rows` as one flat array; fill starts [rows + 1]."""
    starts[0] = 0
    for i in range(rows.shape[0]):
        r, at = rows[i], starts[i]
        n = lengths[r]
        out_tokens[at : at + n] = drafts[r, :n]
        out_probs[at : at + n] = probs[r, :n]
        starts[i + 1] = at + n


@jit
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
            if not hit:
                break
        lengths[r] = 0
    factors_of(predicted, accepted, factors)


@jit
def factors_of(predicted, accepted, factors):
    """Fill in the factor on each cell's probabilities."""
    cells = factors.shape[0] // CELLS[0]
    for kind in range(CELLS[0]):
        first, last = kind * cells, (kind + 1) * cells
        scope = (accepted[first:last].sum() + TRUST) / (predicted[first:last].sum() + TRUST)
        for cell in range(first, last):
            factors[cell] = (accepted[cell] + TRUST * scope) / (predicted[cell] + TRUST)
