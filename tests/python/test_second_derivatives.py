"""There is no second derivative: every way of requesting one, on every route, is refused with a line that says so.

Gradients must never be silently treated as constants, whatever the cotangent requires. The node that refuses must be
reachable from the inputs, since torch.autograd.grad runs no other.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_reference import random  # noqa: E402
from torch_registry import AVAILABLE  # noqa: E402

attention = tessera.torch.attention
grad = torch.autograd.grad
OURS = "^tessera.torch.attention: a second derivative was asked for, accepted is the first$"
PYTORCH_S = "derivative for aten::.*_backward is not implemented"
COMPILED = "double backward|a second derivative was asked for, accepted is the first"


def weights():
    return random(1, 6, 2, 8, seed=1, requires_grad=False)


def operator(q, k, v):
    return torch.ops.tessera.attention_forward(q, k, v, *tessera.torch.options.pack({}))[0]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def of_intermediate_results(attend):
    """The tensors that the program saves for its backward pass are detached, and none of them is an input."""
    return lambda q, k, v: attend(2 * q, 3 * k, 4 * v)


def constant_cotangent(attend, x):
    y = (attend(x, x, x) * weights()).sum()
    (gradient,) = grad(y, x, create_graph=True)
    return grad(y + 10 * gradient.pow(2).sum(), x)


def dependent_cotangent(attend, x):
    y = attend(x, x, x).sin().sum()
    (gradient,) = grad(y, x, create_graph=True)
    return grad(gradient.sum(), x)


def by_backward(attend, x):
    (gradient,) = grad((attend(x, x, x) * weights()).sum(), x, create_graph=True)
    gradient.sum().backward()


def mixed(attend, x):
    q, k, v = (x.detach().clone().requires_grad_() for _ in range(3))
    y = (attend(q, k, v) * weights()).sum()
    (gradient,) = grad(y, q, create_graph=True)
    return grad(y + gradient.sum(), k)


def of_the_cotangent(attend, x):
    cotangent = weights().requires_grad_()
    (gradient,) = grad(attend(x, x, x), x, cotangent, create_graph=True)
    return grad(gradient.sum(), cotangent)


def hessian(attend, x):
    return torch.autograd.functional.hessian(lambda x: (attend(x, x, x) * weights()).sum(), x)


WAYS = [constant_cotangent, dependent_cotangent, by_backward, mixed, of_the_cotangent, hessian]
by_name = lambda way: way.__name__  # noqa: E731


@pytest.mark.parametrize("way", WAYS, ids=by_name)
@pytest.mark.parametrize("route", [attention, operator], ids=by_name)
def test_own_interface(device, route, way):
    with pytest.raises(NotImplementedError, match=OURS):
        way(route, random(1, 6, 2, 8))


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_of_bias_and_sink(device, name):
    x = random(1, 6, 2, 8, requires_grad=False)
    leaf = random(*((1, 2, 6, 6) if name == "bias" else (2,)), seed=2)
    o, lse = attention(x, x, x, **{name: leaf}, return_lse=True)
    for y in ((o * weights()).sum(), lse.sum()):
        (gradient,) = grad(y, leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match=OURS):
            grad(y + gradient.pow(2).sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("way", WAYS, ids=by_name)
def test_compiled(device, way):
    """Compiled programs that save inputs are refused by PyTorch, those that do not by us."""
    for program in (attention, of_intermediate_results(attention)):
        with pytest.raises(RuntimeError, match=COMPILED):
            way(torch.compile(program, fullgraph=True, backend="aot_eager"), random(1, 6, 2, 8))


@pytest.mark.skipif(not AVAILABLE, reason="this release of PyTorch has no torch.library.get_kernel")
@pytest.mark.parametrize("way", WAYS, ids=by_name)
def test_registry(device, way):
    tessera.torch.activate()
    try:
        with pytest.raises(RuntimeError, match=PYTORCH_S):
            way(sdpa, random(1, 6, 2, 8))
        for program in (sdpa, of_intermediate_results(sdpa)):
            with pytest.raises(RuntimeError, match=COMPILED):
                way(torch.compile(program, backend="aot_eager"), random(1, 6, 2, 8))
        assert not tessera.torch.fallback_reasons()
    finally:
        tessera.torch.restore()


def test_func(device):
    func, x, w = torch.func, random(1, 6, 2, 8, requires_grad=False), weights()
    loss = lambda x: (attention(x, x, x) * w).sum()  # noqa: E731
    squares = lambda x: func.grad(loss)(x).pow(2).sum()  # noqa: E731
    for second in (
        func.grad(squares),
        func.jacrev(func.grad(loss)),
        lambda x: func.vmap(func.grad(squares))(torch.stack([x, x])),
        lambda x: grad(squares(x.requires_grad_()), x),
    ):
        with pytest.raises(NotImplementedError, match=OURS):
            second(x)
    for forward in (func.hessian(loss), lambda x: func.jvp(func.grad(loss), (x,), (x,))):
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            forward(x)


def test_forward_mode(device):
    """The first derivative that way is none of ours either, and no tangent is dropped."""
    forward_ad = torch.autograd.forward_ad
    x, tangent = random(1, 6, 2, 8, requires_grad=False), weights()
    plain = [attention(x, x, x), *tessera.combine(torch.stack([x, x]), torch.zeros(2, 1, 2, 6), return_lse=True)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        for call in (
            lambda: attention(x, x, dual),
            lambda: attention(random(1, 6, 2, 8), x, dual),
            lambda: operator(dual, x, x),
            lambda: tessera.combine(torch.stack([dual, dual]), torch.zeros(2, 1, 2, 6)),
            lambda: tessera.attention_backward(x, x, x, plain[0], torch.zeros(1, 2, 6), dual),
        ):
            with pytest.raises(NotImplementedError, match="forward.mode"):
                call()
        again = [attention(x, x, x), *tessera.combine(torch.stack([x, x]), torch.zeros(2, 1, 2, 6), return_lse=True)]
    assert all(torch.equal(one, other) for one, other in zip(plain, again))


@pytest.mark.parametrize("name", ["q", "d_o"])
def test_gradients_by_hand(device, name):
    """tessera.attention_backward is a function of its arguments; its derivative would be a second one."""
    call = dict.fromkeys(("q", "k", "v"), random(1, 6, 2, 8, requires_grad=False))
    call["o"], call["lse"] = tessera.attention(**call, return_lse=True)
    call["d_o"] = weights()
    plain = tessera.attention_backward(**call)
    call[name] = call[name].clone().requires_grad_()
    with torch.no_grad():
        assert not tessera.attention_backward(**call).d_k.requires_grad
    gradients = tessera.attention_backward(**call)
    assert all(torch.equal(one, other) for one, other in zip(plain[:3], gradients[:3]))
    with pytest.raises(NotImplementedError, match=OURS):
        grad(gradients.d_k.sum() + call[name].sum(), call[name])


def test_the_first_derivative_may_keep_its_graph(device):
    """create_graph=True by itself requests nothing that does not exist."""
    x = random(1, 6, 2, 8)
    y = (attention(x, x, x) * weights()).sum() + x.pow(3).sum()
    (plain,) = grad(y, x, retain_graph=True)
    (gradient,) = grad(y, x, create_graph=True)
    assert torch.equal(gradient, plain) and gradient.requires_grad
    compiled = torch.compile(of_intermediate_results(attention), fullgraph=True, backend="aot_eager")
    y = compiled(x, x, x).sum()
    for _ in range(2):
        assert grad(y, x, retain_graph=True)[0].isfinite().all()


def test_merged_results_have_second_derivatives(device):
    """tessera.combine's gradient is written in operators that have their own."""
    o_parts, lse_parts = random(3, 1, 5, 2, 4), random(3, 1, 2, 5, seed=1)

    def plain(o_parts, lse_parts):
        w = torch.softmax(lse_parts, 0).transpose(-1, -2)[..., None]
        return (w * o_parts).sum(0)

    results = []
    for merge, dtype in ((tessera.combine, torch.float32), (plain, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (o_parts, lse_parts)]
        y = merge(*leaves).sin().sum()
        first = grad(y, leaves, create_graph=True)
        results.append([*first, *grad(y + sum(g.pow(2).sum() for g in first), leaves)])
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
