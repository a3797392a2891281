//go:build system

package package_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// testManPages renders the pages: each program has one, and man and whatis can read it.
// dir is where the packages were extracted: minimal systems install no man pages.
func testManPages(t *testing.T, dir string) {
	rig.Need(t, "man", "lexgrog")
	programs, err := os.ReadDir(dir + "/usr/bin")
	check.Require(t, err == nil && len(programs) != 0, "programs: %v, %v", programs, err)
	names := []string{"crust-proxy.yaml"}
	for _, program := range programs {
		names = append(names, program.Name())
	}
	for _, name := range names {
		found, err := filepath.Glob(dir + "/usr/share/man/man*/" + name + ".[158].gz")
		if err != nil || len(found) != 1 {
			t.Errorf("%s has the man pages %v, %v", name, found, err)
			continue
		}
		cmd := exec.Command("man", "--warnings", "--encoding=UTF-8", "--local-file", found[0])
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "MANWIDTH=80", "MAN_KEEP_FORMATTING=")
		var complaints strings.Builder
		cmd.Stderr = &complaints
		page, err := cmd.Output()
		if err != nil || complaints.Len() > 0 || !strings.Contains(string(page), "\nNAME\n       "+name+" ") {
			t.Errorf("%s: %v, %s\n%s", name, err, complaints.String(), page)
		}
		said := run(t, "lexgrog", found[0])
		check.That(t, strings.Contains(said, `"`+name+" - "), "whatis reads %q", said)
	}
}
