package openers

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestCopiesAreOneFile: forks of ours, and systemd's store, have copies of our descriptors. They are
// no opener, and are not named.
func TestCopiesAreOneFile(t *testing.T) {
	const self = 7
	of := func(process uint32, file uint64, program string) hit {
		h := hit{Process: process, File: file}
		copy(h.Program[:], program)
		return h
	}
	got := holdersOf([]hit{of(1, 10, "systemd"), of(self, 10, "crust-proxy"), of(8, 20, "qemu"), of(9, 20, "qemu"), of(9, 21, "qemu"), of(self, 30, "crust-proxy")}, self)
	want := []Holder{{PID: 8, Program: "qemu"}, {PID: 9, Program: "qemu"}}
	check.That(t, got.files == 2 && got.ownFiles == 2 && slices.Equal(got.processes, want), "%+v, want %+v by 2 files, and 2 of our own", got, want)
}

func TestNamesAreBounded(t *testing.T) {
	many := []Holder{{PID: 1, Program: "a", Group: "/"}, {PID: 2, Program: "b", Group: "cri-containerd-x.scope"}, {PID: 3}, {PID: 4}, {PID: 5}}
	names := strings.Join(namesOf(many), ", ")
	want := `process 1 ("a"), process 2 ("b") of the control group "cri-containerd-x.scope", process 3 (""), 2 more processes`
	check.That(t, names == want, "%s, want %s", names, want)
}

// TestAnswersOfOtherFiles: the table of descriptors may move while the kernel reads it.
func TestAnswersOfOtherFiles(t *testing.T) {
	node := inodeReport{Kind: unix.S_IFBLK, Magic: 1, Number: 7 << minorBits} // of devtmpfs: an O_PATH descriptor
	check.That(t, !node.isBlock(), "a device's name counts as the device")
	executed := reportOf([]uint64{5: 1<<32 - 3, 8: 0})
	check.That(t, executed.Writers == 0, "a file that is executed has %d writers", executed.Writers)
	var under count
	under.addUnder(&inodeReport{Kind: unix.S_IFREG, Mode: toWrite, Writers: 3})
	check.That(t, under.below == 2 && under.ofLoop == 1, "under a loop device that writes: %+v", under)
	under = count{}
	under.addUnder(&inodeReport{Kind: unix.S_IFREG, Writers: 1})
	check.That(t, under.below == 1 && under.ofLoop == 0, "under a loop device that reads: %+v", under)
}

func TestMethod(t *testing.T) {
	why := errors.New("no BTF")
	method, got := NewScanner(why).Method()
	check.That(t, method == Scans && errors.Is(got, why), "%s, %v", method, got)
}

// TestLoopsWithoutDescriptors: what cannot be listed may be there.
func TestLoopsWithoutDescriptors(t *testing.T) {
	check.WithoutDescriptors(t, func() {
		check.That(t, eachLoop(nil, func(File) (bool, error) { return true, nil }) != nil, "loop devices cannot be listed, and that is no error")
	})
}
