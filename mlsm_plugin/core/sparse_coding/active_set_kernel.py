"""The compiled inner loop of the active-set solver, which works on one row at a time, in cache.

:mod:`mlsm_plugin.core.sparse_coding.active_set` explains the method. Everything here runs without the interpreter lock,
so that threads can share the rows of a batch. Names that several functions use:

    chosen        (capacity,) the atoms of the working set
    codes         (capacity,) their weights
    gradient      (capacity,) their inner products with the residual
    support       (depth,) places, within the working set, of the atoms whose weights are solved for
    factor        (depth + 1, depth + 1) Cholesky factor (lower, rows) of the support's Gram block, in that order
    local_gram    (capacity, capacity) inner products within the working set; a row is filled when its atom
                  joins the support
    state         (capacity,) state of each atom of the working set: IN the support, OUT of it, or SHUT out because
                  it depends linearly on the support
"""

# no `from __future__ import annotations`: numba reads these functions, not their annotations
import logging
import math

import numpy as np
from numba import njit

# Maximum number of atoms that join the support between two solutions. With fewer, more solutions are needed; with more,
# more atoms leave again. On real hidden states, 6 to 12 are equally fast.
BLOCK = 8
# An atom counts as linearly dependent on the support if its squared distance from the support's span is less than this
# share of its squared norm. A float32 Gram matrix cannot resolve less.
DEPENDENT = 1e-6
SLACK = 1e-6  # slack of the optimality conditions, relative to lambda
NEGLIGIBLE = 1e-12  # a weight counts as zero if it is at most this share of its last downward step
BINS = 512  # bins of the histogram that finds the strongest atoms without sorting
# Refinement ends when a step is below this share of the largest weight, as the next step would be far smaller.
REFINED = 1e-5
MAX_REFINEMENTS = 6
IN = 0
OUT = 1
SHUT = 2

# fairseq opens the root logger, and numba would log its compilation
logging.getLogger("numba").setLevel(logging.WARNING)


def compiled(function):
    """Compile ``function`` at its first call; cache it on disk for later processes if a folder is writable."""
    fastmath = {"reassoc", "contract", "arcp", "nsz"}
    try:
        return njit(cache=True, nogil=True, fastmath=fastmath, error_model="numpy")(function)
    except RuntimeError:  # no folder of the package or the user is writable
        return njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)


@compiled
def add_strongest(values, limit, floor, chosen, places, count):
    """Append to ``chosen`` about ``limit`` atoms with the largest ``values`` above ``floor``; return the new count.

    Args:
        values: (n_atoms,).
        floor: >= 0.
        places: (n_atoms,) place of each atom in ``chosen``, -1 for atoms that are not in it; updated.
    """
    highest = floor
    above = 0
    for atom in range(len(values)):
        if values[atom] > floor:
            above += 1
            highest = max(highest, values[atom])
    threshold = floor
    if above > limit:
        histogram = np.zeros(BINS, np.int64)
        scale = BINS / (highest - floor) * (1 - 1e-6)
        for atom in range(len(values)):
            if values[atom] > floor:
                histogram[min(BINS - 1, int((values[atom] - floor) * scale))] += 1
        lowest = BINS
        kept = 0
        while lowest > 0 and kept + histogram[lowest - 1] <= limit:
            lowest -= 1
            kept += histogram[lowest]
        # if even the highest bin is too full, its atoms are added while there is room
        threshold = floor + min(lowest, BINS - 1) / scale
    for atom in range(len(values)):
        if values[atom] > threshold and places[atom] < 0 and count < len(chosen):
            places[atom] = count
            chosen[count] = atom
            count += 1
    return count


@compiled
def fill_gram_row(gram, atoms, chosen, size, place, local_gram):
    """Fill in the inner products of the atom at ``place`` with the working set, computed if ``gram`` is (0, 0)."""
    atom = chosen[place]
    if len(gram) > 0:
        source = gram[atom]
        for column in range(size):
            local_gram[place, column] = source[chosen[column]]
        return
    for column in range(size):
        column_atom = atoms[chosen[column]]
        total = np.float32(0)
        for i in range(len(column_atom)):
            total += atoms[atom, i] * column_atom[i]
        local_gram[place, column] = total


@compiled
def join(factor, support, size, local_gram, place):
    """Add the atom at ``place`` to the support; return False if it depends linearly on the atoms in it."""
    new = factor[size]
    for i in range(size):
        row = factor[i]
        total = np.float64(local_gram[place, support[i]])
        for k in range(i):
            total -= row[k] * new[k]
        new[i] = total / row[i]
    squared_norm = np.float64(local_gram[place, place])
    rest = squared_norm
    for k in range(size):
        rest -= new[k] * new[k]
    if not rest > DEPENDENT * squared_norm or size == len(factor) - 1:
        return False
    new[size] = math.sqrt(rest)
    support[size] = place
    return True


@compiled
def leave(factor, support, size, member):
    """Remove ``support[member]`` from the support, and from its factor with Givens rotations."""
    for i in range(member, size - 1):
        support[i] = support[i + 1]
        for k in range(i + 2):
            factor[i, k] = factor[i + 1, k]
    for column in range(member, size - 1):
        a = factor[column, column]
        b = factor[column, column + 1]
        length = math.sqrt(a * a + b * b)
        cosine = a / length
        sine = b / length
        for i in range(column, size - 1):
            left = factor[i, column]
            right = factor[i, column + 1]
            factor[i, column] = cosine * left + sine * right
            factor[i, column + 1] = cosine * right - sine * left


@compiled
def solve_with_factor(factor, size, b):
    """Overwrite ``b`` (size,) with the solution ``z`` of ``L L^T z = b``."""
    for i in range(size):
        row = factor[i]
        total = b[i]
        for k in range(i):
            total -= row[k] * b[k]
        b[i] = total / row[i]
    for i in range(size - 1, -1, -1):
        row = factor[i]
        b[i] /= row[i]
        for k in range(i):
            b[k] -= b[i] * row[k]


@compiled
def minimize_on_support(lambda_, factor, support, size, codes, gradient, tracked, local_gram, step):
    """Move to the minimizer over the support, and remove atoms whose weights would turn negative; return the new size.

    Args:
        tracked: number of entries of ``gradient`` that are updated; 0: the caller computes the gradient again.
        step: (depth,) scratch; holds the last step afterwards.
    """
    while size > 0:
        for i in range(size):
            step[i] = gradient[support[i]] - lambda_
        solve_with_factor(factor, size, step)
        fraction = 1.0
        for i in range(size):
            weight = codes[support[i]]
            if weight + step[i] <= 0 and weight < fraction * -step[i]:
                fraction = weight / -step[i]
        for i in range(size if fraction > 0 else 0):
            amount = fraction * step[i]
            codes[support[i]] += amount
            row = local_gram[support[i]]
            for k in range(tracked):
                gradient[k] -= amount * row[k]
        before = size
        for i in range(before - 1, -1, -1):
            if step[i] < 0 and codes[support[i]] <= NEGLIGIBLE * -step[i]:
                codes[support[i]] = 0.0
                leave(factor, support, size, i)
                size -= 1
        if size == before:
            break
        if tracked == 0:  # the gradient is not known after this move
            break
    return size


@compiled
def exchange(factor, support, size, codes, gradient, working_size, local_gram, place, state, step):
    """Replace a member of the support by an atom that depends linearly on the support; return the support size.

    Let ``w`` be the weights with which the members add up to the atom. Adding ``t`` to the atom's weight and ``-t w``
    to the members' weights does not change the residual. If the atom violates the optimality conditions,
    ``sum(w) > 1``, so the penalty falls until a member's weight reaches zero. Call this right after :func:`join` has
    returned False for the atom.
    """
    for i in range(size):
        step[i] = factor[size, i]
    for i in range(size - 1, -1, -1):
        step[i] /= factor[i, i]
        for k in range(i):
            step[k] -= step[i] * factor[i, k]
    amount = math.inf
    leaver = -1
    for i in range(size):
        if step[i] > 0 and codes[support[i]] < amount * step[i]:
            amount = codes[support[i]] / step[i]
            leaver = i
    state[place] = SHUT
    if leaver < 0:
        return size
    state[support[leaver]] = OUT
    for i in range(size):
        codes[support[i]] = max(0.0, codes[support[i]] - amount * step[i])
        for k in range(working_size):
            gradient[k] += amount * step[i] * local_gram[support[i], k]
    codes[support[leaver]] = 0.0
    leave(factor, support, size, leaver)
    size -= 1
    if join(factor, support, size, local_gram, place):
        state[place] = IN
        codes[place] = amount
        for k in range(working_size):
            gradient[k] -= amount * local_gram[place, k]
        size += 1
    return size


@compiled
def add_violators(
    threshold, gram, atoms, chosen, codes, gradient, working_size, factor, support, size, local_gram, state, step
):
    """Add up to ``BLOCK`` atoms that are OUT: the atoms with the largest gradients above ``threshold``.

    Returns:
        whether any atom joined, and the support size.
    """
    joined = 0
    while joined < BLOCK:
        best = -1
        largest = threshold
        for k in range(working_size):
            if gradient[k] > largest and state[k] == OUT:
                best = k
                largest = gradient[k]
        if best < 0:
            break
        fill_gram_row(gram, atoms, chosen, working_size, best, local_gram)
        if join(factor, support, size, local_gram, best):
            state[best] = IN
            size += 1
        else:
            size = exchange(factor, support, size, codes, gradient, working_size, local_gram, best, state, step)
        joined += 1
    return joined > 0, size


@compiled
def solve_working_set(
    lambda_, gram, atoms, chosen, gradient, codes, working_size, factor, support, local_gram, state, step
):
    """Minimize over the working set, starting from ``codes`` and their ``gradient``; return the support size."""
    size = 0
    for k in range(working_size):
        state[k] = OUT
        if codes[k] > 0:
            fill_gram_row(gram, atoms, chosen, working_size, k, local_gram)
            if join(factor, support, size, local_gram, k):
                size += 1
    for _ in range(4 * working_size):
        size = minimize_on_support(lambda_, factor, support, size, codes, gradient, working_size, local_gram, step)
        for k in range(working_size):
            state[k] = SHUT if state[k] == SHUT else OUT
        for i in range(size):
            state[support[i]] = IN
        any_joined, size = add_violators(
            lambda_ * (1 + SLACK),
            gram,
            atoms,
            chosen,
            codes,
            gradient,
            working_size,
            factor,
            support,
            size,
            local_gram,
            state,
            step,
        )
        if not any_joined:
            break
    return size


@compiled
def set_residual(x, atoms, chosen, codes, support, size, residual):
    """Set ``residual`` (dim,) to ``x`` minus the weighted atoms of the support, in float64."""
    for i in range(len(x)):
        residual[i] = x[i]
    for k in range(size):
        weight = codes[support[k]]
        atom = atoms[chosen[support[k]]]
        for i in range(len(x)):
            residual[i] -= weight * atom[i]


@compiled
def inner(a, b):
    """The inner product of ``a`` and ``b`` (dim,) in float64."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@compiled
def refine(x, lambda_, atoms, chosen, codes, gradient, factor, support, size, local_gram, step, residual):
    """Correct the rounding of the Gram matrix by Newton steps with the float64 residual; return the support size."""
    for _ in range(MAX_REFINEMENTS):
        set_residual(x, atoms, chosen, codes, support, size, residual)
        for k in range(size):
            gradient[support[k]] = inner(atoms[chosen[support[k]]], residual)
        before = size
        size = minimize_on_support(lambda_, factor, support, size, codes, gradient, 0, local_gram, step)
        largest_step = largest = 0.0
        for k in range(size):
            largest = max(largest, codes[support[k]])
            largest_step = max(largest_step, abs(step[k]))
        if size == before and largest_step <= REFINED * largest:
            break
    set_residual(x, atoms, chosen, codes, support, size, residual)
    return size


@compiled
def certify(x, lambda_, penalty, atoms, correlation, residual, rounding):
    """Compute the certified relative duality gap of a code, and whether the code meets the optimality conditions.

    Args:
        penalty: ``lambda_`` times the sum of the code.
        correlation: (n_atoms,) float32, inner products of the atoms with ``residual``, with an error of at most
            ``rounding`` times its norm. Products too close to decide are computed again in float64, so the gap is
            rigorous.
    """
    squared = inner(residual, residual)
    error = rounding * math.sqrt(squared)
    highest = np.float32(0)
    for atom in range(len(correlation)):
        highest = max(highest, correlation[atom])
    largest = lambda_
    if highest > lambda_ * (1 + SLACK) + error:
        largest = highest + error
    else:
        for atom in range(len(correlation)):
            if correlation[atom] > lambda_ - error:
                correlation[atom] = inner(atoms[atom], residual)
                largest = max(largest, inner(atoms[atom], residual))
    scale = lambda_ / largest
    primal = 0.5 * squared + penalty
    dual = scale * inner(x, residual) - 0.5 * scale * scale * squared
    gap = (primal - dual) / primal if primal > 0 else 0.0
    return min(1.0, max(0.0, gap)), largest <= lambda_ * (1 + SLACK)


@compiled
def advance_rows(
    first,
    last,
    rows,
    lambda_,
    hidden,
    atoms,
    atoms32,
    gram,
    correlations,
    ranking,
    limit,
    floor,
    rounding,
    support_atoms,
    support_weights,
    support_sizes,
    residuals,
    gaps,
    optimal,
):
    """Run a round of ``rows[first:last]``: certify each row, and solve it on a new working set if it is not optimal.

    Args:
        rows: (n_open,) the rows of ``hidden`` (n_rows, dim) that are not finished.
        lambda_: weight of the l1 penalty.
        atoms, atoms32: (n_atoms, dim) float64 and float32.
        gram: (n_atoms, n_atoms) float32, or (0, 0).
        correlations: (n_open, n_atoms) float32, inner products of the residuals with the atoms.
        ranking: (n_open, n_atoms) float32; the working set is the support, and the ``limit`` atoms with the highest
            values above ``floor``.
        rounding: error bound of ``correlations`` for a residual of norm 1.
        support_atoms, support_weights, support_sizes, residuals, gaps: codes, residuals and gaps of all rows; read
            and written. The size -1 marks a row that has not been solved.
        optimal: (n_open,) bool, written: whether the row is optimal.
    """
    num_atoms = len(atoms)
    depth = support_atoms.shape[1]
    capacity = min(num_atoms, limit + depth)
    chosen = np.empty(capacity, np.int64)
    places = np.full(num_atoms, -1, np.int64)
    codes = np.empty(capacity)
    gradient = np.empty(capacity)
    state = np.empty(capacity, np.int8)
    local_gram = np.empty((capacity, capacity), np.float32)
    # one more than the support can hold, since an atom is factored before `join` can reject it
    factor = np.zeros((depth + 1, depth + 1))
    support = np.empty(depth + 1, np.int64)
    step = np.empty(depth + 1)
    for index in range(first, last):
        row = rows[index]
        held = max(support_sizes[row], 0)
        if support_sizes[row] >= 0:
            penalty = lambda_ * support_weights[row, :held].sum()
            gaps[row], optimal[index] = certify(
                hidden[row], lambda_, penalty, atoms, correlations[index], residuals[row], rounding
            )
            if optimal[index]:
                continue
        for k in range(held):
            chosen[k] = support_atoms[row, k]
            places[chosen[k]] = k
        size = add_strongest(ranking[index], limit, floor, chosen[: min(capacity, held + limit)], places, held)
        for k in range(size):
            places[chosen[k]] = -1
            gradient[k] = correlations[index, chosen[k]]
            codes[k] = support_weights[row, k] if k < held else 0.0
        count = solve_working_set(
            lambda_, gram, atoms32, chosen, gradient, codes, size, factor, support, local_gram, state, step
        )
        count = refine(
            hidden[row],
            lambda_,
            atoms,
            chosen,
            codes,
            gradient,
            factor,
            support,
            count,
            local_gram,
            step,
            residuals[row],
        )
        for k in range(count):
            support_atoms[row, k] = chosen[support[k]]
            support_weights[row, k] = codes[support[k]]
        support_sizes[row] = count
