from attnorm.arithmetic import ceil_div, round_up


def test_the_last_piece_may_be_smaller() -> None:
    assert [ceil_div(number, 3) for number in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert ceil_div(10**18 + 1, 10**9) == 10**9 + 1  # a float would lose the last piece
    assert [round_up(number, 4) for number in (0, 1, 4, 5)] == [0, 4, 4, 8]
