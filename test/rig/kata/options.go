// Package kata emulates a Kata sandbox: it answers on the management socket of a shim as the
// shims of both runtimes do, with the numbers of a filesystem that is really mounted. Tests,
// the demo and the benchmarks use it; the daemon does not.
package kata

import "golang.org/x/sys/unix"

// Flavor is one of Kata's two runtimes.
type Flavor uint8

// Kata's runtimes.
const (
	Go Flavor = iota
	Rust
)

// Fault makes the shim misbehave.
type Fault uint8

// The faults.
const (
	NoFault       Fault = iota
	Hang                // accept, read, never answer
	ServerError         // status 500 with an error text
	NotFound            // status 404
	HalfBody            // less than Content-Length says
	HugeBody            // 1 GiB
	HugeLength          // a Content-Length of 1 GiB, and no byte of it
	WrongJSON           // not what was asked for
	Negative            // a negative number
	CloseAtOnce         // hang up without an answer, which is how runtime-rs says "error"
	HugeHeader          // a header without end
	EndlessChunks       // a chunked body without end
	NotHTTP             // another protocol
)

// Statfs returns the numbers of a mounted filesystem.
type Statfs func() (unix.Statfs_t, error)

// MountedAt returns the numbers of the filesystem mounted at dir.
func MountedAt(dir string) Statfs {
	return func() (unix.Statfs_t, error) {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		return st, err
	}
}

// Options describe the sandbox to emulate.
type Options struct {
	Flavor    Flavor
	SandboxID string
	// Sandboxes is the root of the sockets: /run/vc/sbs or /run/kata.
	Sandboxes string
	// Shared is where runtime-rs keeps what sandboxes share with the host. A path
	// in the guest in which nothing is mounted has the numbers of that directory.
	Shared string
	// Mounts are the filesystems that the guest has mounted, by the device for
	// the Go runtime and by the path in the guest for runtime-rs.
	Mounts map[string]Statfs
	// Resize grows a filesystem. If it is nil, the agent cannot, as today's.
	Resize func(name string, size uint64) error
	// Body, if not nil, is the answer to stats.
	Body []byte
}
