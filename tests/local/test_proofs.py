"""Every rule, proven and broken: a slice for every day, and all of torch's OpInfo (`prove_rules`)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import captured
from mutants import RIGHT_BUT_NOT_OFFERED, telling_calls, verdicts, with_rule
from proving import prove, prove_call, strategies_of
from samples import calls_of, opinfo, table

from autopar.layout import P

RULES = table()
MESHES = [(2,), (3,), (4,), (2, 2)]
BROKEN = [
    "aten.linear.default",
    "aten.bmm.default",
    "aten.embedding.default",
    "aten.layer_norm.default",
    "aten.sum.dim_IntList",
    "aten.permute.default",
    "aten.stack.default",
    "aten.masked_fill.Scalar",
    "autopar.batch_norm",
    "autopar.cross_entropy_sum",
    "autopar.dropout",
    "aten.lstm.input",
    "aten._log_softmax.default",
    "aten.cross_entropy_loss.default",
]


@pytest.mark.parametrize("op", RULES)
def test_every_rule_is_proven(op: str) -> None:
    """On two meshes each; a rule without a call to prove it on is an error."""
    calls = calls_of(op, 0)
    assert calls, f"no sample reaches {op}: write one in tests/samples.py"
    rng = random.Random(op)
    for call in rng.sample(calls, min(len(calls), 3)):
        prove_call(call, rng.sample(MESHES, 2)).check()


@pytest.mark.parametrize("op", BROKEN)
def test_a_broken_rule_is_caught(op: str) -> None:
    calls = calls_of(op, 1)
    found = verdicts(calls)
    for verdict in verdicts(telling_calls(calls, found), found).values():
        known = (verdict.rule, verdict.mutant) in RIGHT_BUT_NOT_OFFERED
        assert verdict.verdict in ("caught", "equivalent") or known, verdict


@pytest.mark.parametrize(
    "name", ["add", "div", "exp", "where", "sum", "mean", "nn.functional.linear", "cat", "reshape"]
)
def test_opinfo_samples(name: str) -> None:
    for _, sample in opinfo([name], 2):
        report = prove(*sample, meshes=[(2,), (3,)])
        assert not report.wrong, report.wrong


def test_a_proof_sees_a_wrong_value() -> None:
    call = captured(torch.relu, (torch.randn(5, 6, dtype=torch.float64),)).calls[0]
    broken = replace(call, bound=with_rule(call, replace(call.op.rule, form=((0,),))))
    (wrong, *_) = prove_call(broken, [(2,)]).wrong
    assert "P 0 on 2: AssertionError: output 0 differs by" in wrong


def test_a_proof_sees_a_gradient_that_is_counted_on_every_rank() -> None:
    """As when the rules take a value for one that has no gradient: values are right."""
    call = captured(torch.exp, (torch.randn(5, 6, dtype=torch.float64),)).calls[0]
    op = replace(call.op, type=replace(call.op.type, differentiable_outs=(False,)))
    broken = replace(call, bound=replace(call.bound, operations=(op,)))
    (wrong,) = prove_call(broken, [(3,)]).wrong
    assert "R on 3: AssertionError: gradient 0 differs by" in wrong


def test_a_proof_sees_a_rank_that_is_cut_off_from_the_graph() -> None:
    """A rank without rows that leaves the graph would not take part in the collectives of the backward pass."""
    x, scores = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    call = captured(F.scaled_dot_product_attention, (x, x, x, scores)).calls[0]
    broken = replace(call, bound=with_rule(call, replace(call.op.rule, filled=False)))
    assert any("gradient 3 is missing on rank" in w for w in prove_call(broken, [(4,)]).wrong)


def test_truth_values_are_no_terms_of_a_sum() -> None:
    """Two ranks that say true are not more true than one."""
    marks, places = torch.zeros(5, 6, dtype=torch.bool), torch.tensor([[0, 2, 2], [1, 1, 5]])
    call = captured(torch.scatter_add, (marks, 1, places, torch.ones(2, 3, dtype=torch.bool))).calls[0]
    assert not [s for s in strategies_of(call.op, (2,)) if (P,) in (*s.ins, *s.outs)]
    prove_call(call).check()


@pytest.mark.parametrize("op", [torch.var, torch.std, torch.var_mean, torch.std_mean, torch.linalg.vector_norm])
def test_statistics_of_complex_numbers_are_of_their_moduli(op: Callable[..., Any]) -> None:
    x = torch.randn(5, 6, dtype=torch.complex128)
    prove(op, (x,), {"dim": 1}, [(2,)]).check()


def test_pooled_means_of_whole_numbers_are_whole() -> None:
    """Also where a window reaches over to the next rank, and the rest that is dropped is negative."""
    x = torch.arange(-45, 45).reshape(1, 3, 5, 6) * 7 % 101 - 50
    prove(F.avg_pool2d, (x, 3), {"stride": 2, "padding": 1}, [(2,), (3,)]).check()
    prove(F.avg_pool1d, (x[0], 3), {"stride": 1, "padding": 1, "count_include_pad": False}, [(2,)]).check()


def test_what_torch_composes_with_a_check_inside_is_refused() -> None:
    x = torch.eye(3, dtype=torch.float64) + 1
    assert captured(torch.linalg.cholesky, (x,)).refused


@pytest.mark.slow
def test_all_of_opinfo() -> None:
    """What `prove_rules` prints for one sample of each type."""
    from prove_rules import prove_all

    found = prove_all(1)
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.unproven()
    assert not found.unexplained(), "\n".join(map(str, found.unexplained()))
    assert not found.stale(), "no longer right, or offered by now"
    assert Counter(v.verdict for v in found.mutants)["caught"] > 2_000
    assert sum(found.proven.values()) > 40_000
