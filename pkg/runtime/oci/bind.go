package oci

import (
	"errors"
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Binding says that a sandbox has mounted a volume, and how the broker can ask it.
type Binding struct {
	// Sandbox is the sandbox id. Note is the runtime's own data; nobody else reads it.
	Sandbox string
	Note    []byte
	// Program is the absolute path of the program to run for stats and the other questions.
	Program string
	// Socket is the absolute path of the socket that answers them too, or "".
	Socket string
}

// lockTime bounds the wait for others who change a volume's directory. They take moments.
const lockTime = 10 * time.Second

// Bind writes the binding: the sandbox id first, and the program last.
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

// Unbind removes the binding of a sandbox and, with the last one, runtime-cli and
// runtime-socket. It succeeds if there is no such binding.
func (m *Mount) Unbind(sandbox string) error { return Unbind(m.dir, sandbox) }

// Unbind removes the binding of a sandbox from a volume's directory, as Mount.Unbind does.
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
