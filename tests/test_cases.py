"""Every situation of the corpus, in every form, on two meshes: read, planned, written, compiled, run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import SITUATIONS
from cases.running import FORMS, MESHES, planned

from toast_cli.base.errors import ToastError

# Of one kind of op each, which `test_halo` splits along every dimension: `make check-all` runs these.
ONE_OP = frozenset(
    """special functions; more special functions; bits; other bits; bits taken apart; clamped; is finite; next number;
    fewer bits; transposed; merged; taken apart; cut across; repeated; stacked; concatenated; split up; backwards;
    diagonal; positions; grid; sorted rows; sorted columns; sorted downwards; argsort; sorted by two keys; running sums;
    running product, backwards; dilated windows; largest in windows; sum by segment; largest by segment; top; slices;
    halves swapped; padded at one end; padded by reflection; updated in a corner; updated along all; updated in whole
    rows; look-up that fills; look-up of columns; look-up of single numbers; look-up of windows; rows multiplied; every
    second row set; numbers added one by one; product; outer product; inner product; batched product; Kronecker product;
    convolution, stride 2; convolution, dilated; convolution, transposed; convolution along a line; convolution in
    space; Fourier of columns; Fourier, back; Fourier of reals; Fourier in two dimensions; Cholesky; solved by
    triangles; solved by triangles, from the right; linear algebra in StableHLO; product and parity; slice at an
    unknown place; row at an unknown place; look-up; look-up that clips; look-up along; gradient of a look-up; rows
    added; rows at most; convolution; convolution by channel; convolution of groups of images; gradient of a
    convolution; Fourier; either; barrier; gradient of windows""".replace("\n   ", "").split("; ")
)
assert SITUATIONS.keys() >= ONE_OP


def trials() -> list[Any]:
    """(situation, mesh, form): on the first mesh each situation is written in one form, in turn; `make check-all`
    runs the rest, other meshes and large programs."""
    found = []
    for number, (name, situation) in enumerate(SITUATIONS.items()):
        for mesh in [situation.mesh] if situation.mesh else MESHES:
            for form in FORMS:
                marks = []
                if name in ONE_OP or situation.large or mesh != next(iter(MESHES)) or form != FORMS[number % 2]:
                    marks.append(pytest.mark.thorough)
                found.append(pytest.param(name, mesh, form, marks=marks, id=f"{name}, {mesh}, {form}"))
    return found


@pytest.mark.parametrize(("name", "mesh", "form"), trials())
def test_as_promised(name: str, mesh: str, form: str) -> None:
    at, refused = planned(name, mesh), SITUATIONS[name].refused.get(form)
    at.read_pages()
    if refused is None:
        assert list(at.wrong_with(form)) == []
        return
    with pytest.raises(ToastError) as error:
        at.written(form)
    assert re.search(refused, str(error.value)), error.value
    assert error.value.hint
