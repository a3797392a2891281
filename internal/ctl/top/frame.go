package top

// frame says which lines stand around the rows. A low terminal has few of them.
type frame struct {
	title, totals, sum, alert, filter, blank, heading, message, hints bool
	rows                                                              int
}

// fewestRows is what the other lines leave to the rows.
const fewestRows = 3

func (s *State) frame() frame {
	f := frame{rows: s.height}
	take := func(wanted bool, spare int) bool {
		if !wanted || f.rows <= fewestRows+spare {
			return false
		}
		f.rows--
		return true
	}
	// What tells that the picture is old or not whole comes before all else.
	f.filter = take(s.input != nil || s.shownFilter() != "" || s.settings.selects(), -1)
	f.alert = take(s.alarmed() != "", 0)
	f.heading = take(true, 0)
	f.title = take(true, 0)
	f.hints = take(true, 1)
	f.message = take(true, 2)
	f.totals = take(true, 2)
	f.sum = take(true, 4)
	f.blank = take(true, 8)
	return f
}

// selects tells whether only some of the node's volumes are wanted.
func (s Settings) selects() bool { return s.State != "" || s.Driver != "" || s.Handler != "" }

// alarmed is what is wrong with the node, in a line; empty is nothing.
func (s *State) alarmed() string {
	switch {
	case s.link.away:
		return "away"
	case len(s.node.problems) > 0:
		return s.node.problems[0]
	}
	return ""
}
