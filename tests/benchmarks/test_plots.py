"""Bar charts of speeds."""

from benchmarks.plots import make_figure


def test_the_line_at_one_strikes_no_label_through():
    lines = [
        {"text": "chat", "auto": 0.97, "context": 1.5},
        {"text": "maths", "auto": 1.0, "context": None},
    ]
    (axes,) = make_figure(lines, "speed", has_line=True).axes
    (line,) = axes.lines
    labels = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in labels] == ["0.97", "1.00", "1.50"]
    for text in labels:
        assert text.get_zorder() > line.get_zorder()
        background = text.get_bbox_patch()
        assert background.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
