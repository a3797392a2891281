package guest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// limitDevices restricts the processes of a group to the devices that a spec allows. Without it,
// they could open the disks of all volumes of the pod.
func (g cgroup) limitDevices(rules []specs.LinuxDeviceCgroup) error {
	instructions, err := deviceProgram(append(slices.Clone(rules), usualDevices()...))
	if err != nil {
		return err
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupDevice, Instructions: instructions, License: "Apache-2.0"})
	if err != nil {
		return err
	}
	defer func() { _ = program.Close() }() // the group keeps a reference
	group, err := sys.OpenDir(g.file(""))
	if err != nil {
		return err
	}
	defer sys.CloseFD(group)
	return link.RawAttachProgram(link.RawAttachProgramOptions{Target: group, Program: program, Attach: ebpf.AttachCGroupDevice})
}

// usualDevices are allowed for every container, as with runc: to create any device node, and to
// open the devices of makeDevices and terminals.
func usualDevices() []specs.LinuxDeviceCgroup {
	rules := []specs.LinuxDeviceCgroup{{Allow: true, Access: "m"}}
	const terminals, every = 136, -1
	for _, number := range [][2]int64{{1, 3}, {1, 5}, {1, 7}, {1, 8}, {1, 9}, {5, 0}, {5, 2}, {terminals, every}} {
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &number[0], Minor: &number[1], Access: "rwm"})
	}
	return rules
}

var (
	deviceTypes  = map[string]int32{"b": unix.BPF_DEVCG_DEV_BLOCK, "c": unix.BPF_DEVCG_DEV_CHAR, "u": unix.BPF_DEVCG_DEV_CHAR}
	deviceAccess = map[rune]int32{'m': unix.BPF_DEVCG_ACC_MKNOD, 'r': unix.BPF_DEVCG_ACC_READ, 'w': unix.BPF_DEVCG_ACC_WRITE}
)

// deviceProgram is the eBPF program that the kernel runs for each access. The last rule that
// matches decides; without a match the access is refused.
func deviceProgram(rules []specs.LinuxDeviceCgroup) (asm.Instructions, error) {
	const context, kind, access, major, minor = asm.R1, asm.R2, asm.R3, asm.R4, asm.R5
	const scratch, answer = context, asm.R0 // once the context has been read
	program := asm.Instructions{
		asm.LoadMem(kind, context, 0, asm.Word), asm.Mov.Reg(access, kind), asm.And.Imm(kind, 0xffff), asm.RSh.Imm(access, 16),
		asm.LoadMem(major, context, 4, asm.Word), asm.LoadMem(minor, context, 8, asm.Word),
	}
	label := func(i int) string { return "rule" + strconv.Itoa(i) }
	for i, rule := range slices.Backward(rules) {
		next := label(i - 1)
		program = append(program, asm.Mov.Reg(scratch, access).WithSymbol(label(i)))
		var mask int32
		for _, letter := range rule.Access {
			mask |= deviceAccess[letter]
		}
		// Allow matches if it covers the whole access, deny if it covers a part of it.
		if rule.Allow {
			program = append(program, asm.And.Imm(scratch, ^mask), asm.JNE.Imm(scratch, 0, next), asm.Mov.Imm(answer, 1))
		} else {
			program = append(program, asm.And.Imm(scratch, mask), asm.JEq.Imm(scratch, 0, next), asm.Mov.Imm(answer, 0))
		}
		if is, known := deviceTypes[rule.Type]; known {
			program = append(program, asm.JNE.Imm(kind, is, next))
		} else if strings.Trim(rule.Type, "a") != "" {
			return nil, fmt.Errorf("the type %q of a device: %w", rule.Type, errInvalid)
		}
		for register, number := range map[asm.Register]*int64{major: rule.Major, minor: rule.Minor} {
			if number != nil && *number >= 0 {
				program = append(program, asm.JNE.Imm(register, int32(*number), next)) //nolint:gosec // of 12 and 20 bits
			}
		}
		program = append(program, asm.Return())
	}
	return append(program, asm.Mov.Imm(answer, 0).WithSymbol(label(-1)), asm.Return()), nil
}
