package volume

// Unit is what a Usage counts.
type Unit uint8

// The units, numbered as in Kata's replies.
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

// Condition is the health of a volume, as its sandbox reports it or its device
// shows it.
type Condition struct {
	Abnormal bool
	Message  string
	// Reason is one word for programs, such as abi.ReasonReadOnly, or empty.
	Reason string
}

// Report is a sandbox's answer about a volume, after its checks. The Condition is nil if
// it is not known.
type Report struct {
	Usage     []Usage
	Condition *Condition
	// Sandbox is the sandbox that answered, if the handler knows it.
	Sandbox string
	// GroupIgnored is set where the sandbox's runtime ignores the volume's group, and
	// the root directory is not known to be writable for that group.
	GroupIgnored bool
}

// Range is a requested size in bytes; a zero Limit is none.
type Range struct {
	Required int64
	Limit    int64
}
