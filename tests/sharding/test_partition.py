"""partition: the bounds of chunks, as torch.chunk has them."""

import pytest
import torch

from autotp.sharding.partition import chunk_bounds, chunk_length, chunk_sizes


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 13])
def test_chunk_bounds_are_those_of_torch_chunk(parts: int) -> None:
    for n in range(1, 60):
        expected = [list(chunk) for chunk in torch.arange(n).chunk(parts)]
        expected += [[]] * (parts - len(expected))
        bounds = [chunk_bounds(n, parts, index) for index in range(parts)]
        assert [list(range(*each)) for each in bounds] == expected
        assert chunk_sizes(n, parts) == [len(each) for each in expected]
        assert chunk_length(n, parts) == len(expected[0])


def test_chunk_sizes_of_published_examples() -> None:
    assert chunk_sizes(50257, 8) == [6283] * 7 + [6276]
    assert chunk_sizes(12, 8) == [2, 2, 2, 2, 2, 2, 0, 0]
    assert chunk_sizes(0, 3) == [0, 0, 0]


def test_chunk_bounds_compile_with_a_symbolic_length() -> None:
    def last_part(x: torch.Tensor) -> torch.Tensor:
        start, stop = chunk_bounds(x.shape[0], 4, 3)
        return x[start:stop]

    compiled = torch.compile(last_part, backend="eager", fullgraph=True, dynamic=True)
    for n in (8, 10, 11):
        assert compiled(torch.arange(n)).tolist() == torch.arange(n).chunk(4)[3].tolist()
