package top

import "slices"

// hint is a line of the help: a key or a sign, and what it is for.
type hint struct{ key, does string }

// helpKeys are all keys, in two groups.
var helpKeys = [][]hint{
	{
		{"up, down, k, j", "choose a volume"},
		{"pgup, pgdown", "a page up or down"},
		{"home, g; end, G", "to the first; to the last"},
		{"enter", "all of the volume; esc: back"},
		{"/", "filter: all words must be in name, pod, state, ..."},
		{"esc", "no filter"},
	},
	{
		{"u l a t n", "sort by usage, latency, age, state, name"},
		{"s, r", "sort by the next; turn the order round"},
		{"p, space", "pause: the picture stands still, nobody is asked"},
		{"r", "on a volume's page: ask its sandbox now"},
		{"?, h", "this page"},
		{"ctrl+z; q, ctrl+c", "suspend; quit"},
	},
}

// helpMarks say what signs mean.
var helpMarks = []hint{
	{"!", "before a volume: it has an error; before a time: the sandbox failed"},
	{"USED/SIZE", "as the sandbox said last; it is asked only while it can be seen"},
	{"STATS", "how long the sandbox took to answer"},
}

func helpPage(c canvas) []string {
	lines := []string{c.line([]span{{bold, "crustctl top"}, {faint, "  keys"}})}
	for _, group := range append(slices.Clone(helpKeys), helpMarks) {
		if c.height > 20 {
			lines = append(lines, "")
		}
		for _, h := range group {
			lines = append(lines, c.line([]span{{bold, "  " + c.fit(h.key, 19, false)}, {plain, h.does}}))
		}
	}
	page := make([]string, c.height)
	copy(page, lines)
	page[c.height-1] = c.line([]span{{faint, "any key: back"}})
	return page
}
