"""Tables of docs that scripts make."""


def replace_between(text: str, begin: str, end: str, table: str) -> str:
    """The text with `table` between the lines `begin` and `end`, which stay."""
    head, rest = text.split(begin)
    return head + begin + table + end + rest.split(end)[1]
