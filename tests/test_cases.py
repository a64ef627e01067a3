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
    """special functions; more special functions; is finite; next number; repeated; stacked; concatenated; diagonal;
    grid; sorted downwards; argsort; sorted by two keys; running product, backwards; dilated windows; sum by
    segment; largest by segment; padded by reflection; updated along all; look-up that fills; look-up of columns;
    look-up of single numbers; look-up of windows; rows multiplied; every second row set; numbers added one by one;
    inner product; Kronecker product; convolution along a line; convolution in space; Fourier of columns; Fourier,
    back; Fourier of reals; Fourier in two dimensions; solved by triangles, from the right; row at an unknown place;
    look-up that clips""".replace("\n   ", "").split("; ")
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
