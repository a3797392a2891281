// Package abi is the directory ABI between the broker and a runtime handler, for both sides: the names and contents of
// files, and the arguments and answers of a handler's program. docs/runtime-authors.md describes it as a wire document.
//
// It is for authors of runtimes and shims, and for the broker. It imports neither the broker
// nor gRPC, so that a program that is started for each container stays small.
// Names and types are only added; to remove one would be a new major version.
package abi

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// DefaultRoot is where the directories of volumes are, unless configured otherwise.
const DefaultRoot = "/run/crust"

// The files in the directory of a volume. Any other name that does not begin with
// a dot is the id of a sandbox that has mounted the volume.
const (
	// InfoName is the broker's: what to mount, and how.
	InfoName = "mountInfo.json"
	// CLIName is the handler's: one line, the absolute path of its program.
	CLIName = "runtime-cli"
	// SocketName is the handler's: one line, the absolute path of its socket.
	SocketName = "runtime-socket"
)

// The first argument of a handler's program is Word, the second one of the others.
const (
	Word        = "crust"
	Stats       = "stats"
	Resize      = "resize"
	Freeze      = "freeze"
	Thaw        = "thaw"
	ThawExpired = "thaw-expired"
)

// The exit statuses of a handler's program. Any other one means that it refused.
const (
	ExitOK          = 0
	ExitRefused     = 1
	ExitUsage       = 2
	ExitNoSandbox   = 3
	ExitUnsupported = 4
	ExitOutOfRange  = 5
	// ExitWrongState: freeze found the volume frozen, or thaw found it not frozen all the time.
	ExitWrongState = 6
)

// GuardPrefix begins the mount source of every guard mount; the name of the volume's directory follows.
const GuardPrefix = "crust:"

// DirName returns the name of a volume's directory: the SHA-256 of its resolved target path in hexadecimal.
func DirName(target string) string {
	sum := sha256.Sum256([]byte(target))
	return hex.EncodeToString(sum[:])
}

// IsDirName reports whether a name has the form that DirName gives.
func IsDirName(name string) bool {
	return len(name) == 2*sha256.Size && strings.Trim(name, "0123456789abcdef") == ""
}

// IsSandboxID reports whether a name can be the id of a sandbox. It is safe as a part of a path.
func IsSandboxID(name string) bool {
	const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	return name != "" && len(name) <= 128 && name != InfoName && name != CLIName && name != SocketName &&
		strings.IndexByte(letters, name[0]) >= 0 && strings.Trim(name, letters+"_.-") == ""
}

// StatsReply is what a program prints for stats.
type StatsReply struct {
	Usage     []Usage    `json:"usage"`
	Condition *Condition `json:"volume_condition,omitempty"`
}

// Usage is one measure of a filesystem.
type Usage struct {
	Available int64  `json:"available"`
	Total     int64  `json:"total"`
	Used      int64  `json:"used"`
	Unit      string `json:"unit"` // UnitBytes or UnitInodes
}

// The units of a Usage.
const (
	UnitBytes  = "BYTES"
	UnitInodes = "INODES"
)

// Condition is the health of the volume.
type Condition struct {
	Abnormal bool   `json:"abnormal"`
	Message  string `json:"message"`
	// Reason is the worst of what is wrong: one of those below, or another word of letters.
	Reason string `json:"reason,omitempty"`
}

// The reasons why a volume is abnormal, the worst first.
const (
	// ReasonShutDown: the filesystem neither reads nor writes any more.
	ReasonShutDown = "ShutDown"
	// ReasonReadOnly: the kernel made the filesystem read-only after an error.
	ReasonReadOnly = "ReadOnly"
	// ReasonErrors: the filesystem has recorded errors.
	ReasonErrors = "ErrorsOnRecord"
	// ReasonFrozen: writes are held, and nobody is left to end that.
	ReasonFrozen = "WritesHeld"
)

// ThawExpiredReply is what a program prints for thaw-expired.
type ThawExpiredReply struct {
	// Thawed are the names of the directories of the volumes that were frozen although their time was over.
	Thawed []string `json:"thawed"`
	// NextSeconds is when to ask again; 0 if nothing is frozen.
	NextSeconds int64 `json:"next_seconds"`
	// Problem says what could not be thawed; it is tried again.
	Problem string `json:"problem,omitempty"`
}

// ResizeReply is what a program prints for resize: the size of the filesystem's device that it fills now.
type ResizeReply struct {
	CapacityBytes int64 `json:"capacity_bytes"`
}
