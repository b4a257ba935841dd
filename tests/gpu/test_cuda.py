"""One GPU: the emitted module against eager.  Skipped where there is none."""

from __future__ import annotations

import copy

import models
import pytest
import torch

import autopar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "resnet"])
def test_one_gpu_trains_as_eager(name: str) -> None:
    case = models.MODELS[name]()
    model = copy.deepcopy(case.model).float().cuda()
    batch = {k: v.cuda().float() if v.is_floating_point() else v.cuda() for k, v in case.batch.items()}
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=1, device="H100")
    module = autopar.parallelize(model, cluster, batch, loss_fn=case.loss_fn)
    loss = module.forward_backward(batch)
    outputs = model(**{k: v for k, v in batch.items() if case.loss_fn is None or k == "x"})
    expected = outputs.loss if case.loss_fn is None else case.loss_fn(outputs, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    gradients = module.full_gradients()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5)
