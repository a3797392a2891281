package mountwatch

import (
	"os"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestForbiddenMounts(t *testing.T) {
	w := &Watch{devices: make(map[string]bool)}
	w.Add("/dev/loop7", "7:7")
	for line, want := range map[string]bool{
		"36 35 7:7 / /mnt rw - ext4 /dev/root rw":                      true,
		"36 35 0:44 / /mnt rw shared:1 master:2 - btrfs /dev/loop7 rw": true,
		"36 35 7:70 / /mnt rw - ext4 /dev/loop70 rw":                   false,
		"36 35 0:5 / /dev/loop7 rw - tmpfs crust:ab rw":                false,
	} {
		check.Equal(t, len(check.Value(mountinfo.GetMountsFromReader(strings.NewReader(line), w.others))(t)) == 1, want, "%q", line)
	}
}

// Who cannot look has not seen that there is nothing.
func TestABrokenWatchIsNoProof(t *testing.T) {
	file := check.Value(os.Open("/proc/self/mountinfo"))(t)
	w := &Watch{file: file}
	check.Must(t, w.CheckNone())
	check.Must(t, file.Close())
	check.That(t, w.CheckNone() != nil, "a list that cannot be read shows that nothing is mounted")
}
