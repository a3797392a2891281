package confine

import (
	"encoding/binary"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestCallsOfTheFilter: what a newer kernel has is as absent as on an older one.
func TestCallsOfTheFilter(t *testing.T) {
	var program []bpf.Instruction
	for _, f := range filter(unix.AUDIT_ARCH_X86_64) {
		program = append(program, bpf.RawInstruction{Op: f.Code, Jt: f.Jt, Jf: f.Jf, K: f.K}.Disassemble())
	}
	vm := check.Value(bpf.NewVM(program))(t)
	for call, want := range map[uint32]unix.SockFilter{
		unix.SYS_READ: allow, unix.SYS_SETXATTR: refuse, unix.SYS_SEMOP: refuse, unix.SYS_INOTIFY_INIT1: refuse, unix.SYS_FILE_GETATTR: allow, unix.SYS_FILE_SETATTR: refuse, newest: allow, newest + 1: absent, 1 << 30: end,
	} {
		data := make([]byte, 64) // big-endian for this machine
		binary.BigEndian.PutUint32(data[atNumber:], call)
		binary.BigEndian.PutUint32(data[atArch:], unix.AUDIT_ARCH_X86_64)
		check.Equal(t, uint32(check.Value(vm.Run(data))(t)), want.K, "the answer to call %d", call)
	}
}

// TestAFilterThatIsRefusedIsAnError: only a kernel without seccomp does without one.
func TestAFilterThatIsRefusedIsAnError(t *testing.T) {
	err := onThreadOfItsOwn(func() error {
		check.Must(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return install([]unix.SockFilter{{Code: 0xffff}})
	})
	check.That(t, err != nil, "a program started without the filter")
}
