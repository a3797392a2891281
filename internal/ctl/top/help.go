package top

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

func (s *State) helpPage() []string {
	lines := []string{s.line([]span{{bold, "crustctl top"}, {faint, "  keys"}}, nil)}
	add := func(hints []hint) {
		if s.height > 20 {
			lines = append(lines, "")
		}
		for _, h := range hints {
			lines = append(lines, s.line([]span{{bold, "  " + s.fit(h.key, 19, false)}, {plain, h.does}}, nil))
		}
	}
	for _, group := range helpKeys {
		add(group)
	}
	add(helpMarks)
	lines = lines[:min(len(lines), s.height-min(s.height, 1))]
	for len(lines) < s.height-1 {
		lines = append(lines, "")
	}
	return append(lines, s.line([]span{{faint, "any key: back"}}, nil))
}
