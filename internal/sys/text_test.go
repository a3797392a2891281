package sys

import "testing"

func TestClipTo(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"", 0, ""},
		{"four", 4, "four"},
		{"fives", 4, "five..."},
		{"fünf", 2, "f..."},
		{"fünf", 3, "fü..."},
		{"\x80\x80\x80", 2, "..."},
	} {
		if got := ClipTo(c.text, c.most); got != c.want {
			t.Errorf("ClipTo(%q, %d) = %q, want %q", c.text, c.most, got, c.want)
		}
	}
}
