package oci

import (
	"errors"
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Binding tells the broker that a sandbox has mounted a volume, and how to ask it.
type Binding struct {
	// Sandbox is the sandbox id, and Note what the runtime wants to remember of it;
	// nobody else reads that.
	Sandbox string
	Note    []byte
	// Program is the absolute path of the program to run for stats and the rest.
	Program string
	// Socket is the absolute path of the socket that answers the same, or "".
	Socket string
}

// lockTime bounds the wait for others who change a volume's directory, which
// takes them moments.
const lockTime = 10 * time.Second

// Bind writes the binding down: first which sandbox it is, then how to ask it, so
// that whoever sees the one finds the other.
func (m *Mount) Bind(b Binding) error {
	if !abi.IsSandboxID(b.Sandbox) {
		return fmt.Errorf("%q cannot be the id of a sandbox", b.Sandbox)
	}
	return locked(m.dir, func() error {
		if err := m.dir.Put(b.Sandbox, b.Note); err != nil {
			return err
		}
		if b.Socket != "" {
			if err := m.dir.Put(abi.SocketName, []byte(b.Socket+"\n")); err != nil {
				return err
			}
		}
		return m.dir.Put(abi.CLIName, []byte(b.Program+"\n"))
	})
}

// Unbind takes the binding of a sandbox back; with the last one the words how to
// ask go too. A binding that is not there is a success.
func (m *Mount) Unbind(sandbox string) error { return Unbind(m.dir, sandbox) }

// Unbind takes the binding of a sandbox out of a volume's directory.
func Unbind(dir *abi.Dir, sandbox string) error {
	if !abi.IsSandboxID(sandbox) {
		return fmt.Errorf("%q cannot be the id of a sandbox", sandbox)
	}
	return locked(dir, func() error {
		if err := dir.Remove(sandbox); err != nil {
			return err
		}
		left, err := dir.Sandboxes()
		if err != nil || len(left) > 0 {
			return err
		}
		return errors.Join(dir.Remove(abi.CLIName), dir.Remove(abi.SocketName))
	})
}

func locked(dir *abi.Dir, f func() error) error {
	if err := dir.Lock(lockTime); err != nil {
		return err
	}
	return errors.Join(f(), dir.Unlock())
}
