package top

// frame says which lines stand around the rows of the list.
type frame struct {
	title, totals, sum, alert, filter, blank, heading, message, hints bool
	rows                                                              int
}

// fewestRows is what the other lines leave to the rows.
const fewestRows = 3

// newFrame chooses the lines that a screen has room for. What says that the list is
// incomplete or out of date comes before all else.
func newFrame(height int, filter, alert bool) frame {
	f := frame{rows: height}
	fits := func(wanted bool, spare int) bool {
		if !wanted || f.rows <= fewestRows+spare {
			return false
		}
		f.rows--
		return true
	}
	f.filter = fits(filter, -1)
	f.alert = fits(alert, 0)
	f.heading = fits(true, 0)
	f.title = fits(true, 0)
	f.hints = fits(true, 1)
	f.message = fits(true, 2)
	f.totals = fits(true, 2)
	f.sum = fits(true, 4)
	f.blank = fits(true, 8)
	return f
}
