"""fuse-communication: the same bytes in fewer collectives, and equal text after a second run."""

import pytest
from support.harness import (
    traffic,
)
from support.pass_inputs import forms
from xdsl.context import Context

import shardir
from shardir.algebra.mesh import Mesh
from shardir.passes.fuse_communication import FuseCommunication


def test_fusing_moves_the_same_bytes_in_no_more_collectives():
    for module, mesh, p in forms("fuse-communication"):
        counts = []
        for max_bytes in (0, 64, 1 << 20):
            fused = module.clone()
            FuseCommunication(max_bytes=max_bytes).apply(Context(), fused)
            fused.verify()
            count, received = traffic(fused, p.name, mesh)
            assert received == pytest.approx(traffic(module, p.name, mesh)[1])
            counts.append(count)
            assert not p.errors(fused, 100)
        assert counts[0] == traffic(module, p.name, mesh)[0] and counts[2] <= counts[0] >= counts[1]


def test_reductions_of_one_group_are_fused() -> None:
    text = """
        dist.mesh @m <a = 2>
        #sum = #dist.local<@m, [{}], partial sum {a}>
        #all = #dist.local<@m, [{}]>
        func.func @f(%x: tensor<4xf32, #sum>, %y: tensor<6xf32, #sum>)
            -> (tensor<4xf32, #all>, tensor<6xf32, #all>) {
          %u = dist.all_reduce <sum> %x over <a> : (tensor<4xf32, #sum>) -> tensor<4xf32, #all>
          %v = dist.all_reduce <sum> %y over <a> : (tensor<6xf32, #sum>) -> tensor<6xf32, #all>
          func.return %u, %v : tensor<4xf32, #all>, tensor<6xf32, #all>
        }"""
    mesh, received = Mesh("m", (("a", 2),)), []
    for max_bytes, count in ((0, 2), (1 << 20, 1)):
        fused = shardir.parse(text)
        FuseCommunication(max_bytes=max_bytes).apply(Context(), fused)
        collectives, elements = traffic(fused, "f", mesh)
        assert collectives == count
        received.append(elements)
    assert received[0] == received[1]


def test_casts_keep_their_order() -> None:
    """Two casts that use results of the same op were exchanged by each run of the fusion."""
    text = """
        dist.mesh @m <a = 2>
        #sum = #dist.local<@m, [{}], partial sum {a}>
        #all = #dist.local<@m, [{}]>
        func.func @f(%x: tensor<4xf32, #sum>, %y: tensor<4xf32, #sum>) -> tensor<4xf64, #all> {
          %u = dist.all_reduce <sum> %x over <a> : (tensor<4xf32, #sum>) -> tensor<4xf32, #all>
          %v = dist.all_reduce <sum> %y over <a> : (tensor<4xf32, #sum>) -> tensor<4xf32, #all>
          %p = nn.convert %u : (tensor<4xf32, #all>) -> tensor<4xf64, #all>
          %q = nn.convert %v : (tensor<4xf32, #all>) -> tensor<4xf64, #all>
          %r = nn.add %p, %q : (tensor<4xf64, #all>, tensor<4xf64, #all>) -> tensor<4xf64, #all>
          func.return %r : tensor<4xf64, #all>
        }"""
    once = shardir.compile(text, "fuse-communication")
    assert shardir.compile(once.module, "fuse-communication").text == once.text
