package deferral

// Unit is what a Usage counts.
type Unit uint8

// The units, numbered as in CSI and in Kata's replies.
const (
	UnitUnknown Unit = 0
	UnitBytes   Unit = 1
	UnitInodes  Unit = 2
)

// Usage is one measure of a filesystem. None of its numbers is negative, and
// neither Available nor Used exceeds Total.
type Usage struct {
	Available int64
	Total     int64
	Used      int64
	Unit      Unit
}

// Condition is the health of a volume as its sandbox sees it.
type Condition struct {
	Abnormal bool
	Message  string
}

// Report is what a sandbox said of a volume, checked: at least one Usage or a
// Condition.
type Report struct {
	Usage     []Usage
	Condition *Condition
}

// Range is a wished size in bytes; a zero Limit means none.
type Range struct {
	Required int64
	Limit    int64
}
