import math

import pytest

from torchperf_ros.analysis.anomalies_rows import Rows, SeriesError


@pytest.fixture
def rows(tmp_path):
    def read(text, encoding="utf-8"):
        path = tmp_path / "series.csv"
        path.write_bytes(text.encode(encoding))
        with open(path, "rb") as file:
            return list(Rows(path, file))

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timestamp,value\n2014-02-14 14:30:00,0.5\n", [(1392388200.0, 0.5)]),
        ("2014-02-14 14:30:00,0.5\n", [(1392388200.0, 0.5)]),
        ("2014-02-14T14:30:00Z,1e3\r\n2014-02-14T15:30:00.5+01:00,2\r\n", [(1392388200.0, 1e3), (1392388200.5, 2.0)]),
        ("2014-02-14,3\n2014/02/15,4", [(1392336000.0, 3.0), (1392422400.0, 4.0)]),
        ("0,1\n1,2\n0.5,3\n0.5,3\n", [(0.0, 1.0), (1.0, 2.0), (0.5, 3.0), (0.5, 3.0)]),
        ("1392388200000,1\n", [(1392388200.0, 1.0)]),
        ("1392388200000000,1\n", [(1392388200.0, 1.0)]),
        ("1392388200000000000,1\n", [(1392388200.0, 1.0)]),
        ("time;value\n\n5;2\n", [(5.0, 2.0)]),
        ("t\tx\n5\t2\n", [(5.0, 2.0)]),
        ('\ufeff"timestamp","value"\n"5","2"\n', [(5.0, 2.0)]),
        ("value,timestamp\n7,5\n", [(5.0, 7.0)]),
        ("host,timestamp,cpu,value\na,5,1,7\n", [(5.0, 7.0)]),
    ],
)
def test_given_a_way_to_write_a_series_when_read_then_times_and_values_are_right(rows, text, expected):
    assert [(row.time_s, row.value) for row in rows(text)] == expected


@pytest.mark.parametrize("missing", ["", "NaN", "nan", "NA", "null", " "])
def test_given_a_missing_value_when_read_then_it_is_nan_and_its_text_is_kept(rows, missing):
    (_, row) = rows(f"1,5\n2,{missing}\n")
    assert math.isnan(row.value)
    assert row.text == missing


def test_given_a_first_row_without_a_value_when_read_then_it_is_a_row(rows):
    assert len(rows("2014-02-14,NaN\n2014-02-15,1\n")) == 2
    assert len(rows("2014-02-14,\n2014-02-15,1\n")) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["series.csv", "empty"]),
        ("5\n6\n", [":1:", "'5'", "timestamp,value"]),
        ("timestamp,value\n1,2\n2\n", [":3:", "'2'", "1 fields", "timestamp,value"]),
        ("timestamp,value\n1,2\n2,many\n", [":3:", "'many'", "no number"]),
        ("timestamp,value\n1,2\nyesterday,3\n", [":3:", "'yesterday'", "ISO"]),
        ("1,2\n,3\n", [":2:", "''", "ISO"]),
        ("1,2\ninf,3\n", [":2:", "'inf'", "ISO"]),
        ("1,2\n\n\nx,3\n", [":4:", "'x'"]),
    ],
)
def test_given_what_cannot_be_read_when_read_then_the_error_says_where_and_what_would_be_right(rows, text, words):
    with pytest.raises(SeriesError) as error:
        rows(text)
    assert all(word in str(error.value) for word in words), error.value


def test_given_no_text_when_read_then_the_error_says_so(rows):
    with pytest.raises(SeriesError, match="UTF-8"):
        rows("1,ä\n", encoding="latin-1")
