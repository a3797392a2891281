//go:build system

package package_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	name   = "crust-proxy"
	config = "/etc/crust-proxy/config.yaml"
)

// names are the packages, in the order in which they are installed: the others take programs over
// from a crust-proxy that still has them.
var names = []string{"crust-runtimes", "crust-backup", name}

// wanted is what both formats of a package must bring; in the rest they differ.
var wanted = map[string][]string{
	name: {
		config,
		"/usr/bin/crust-proxy",
		"/usr/bin/crustctl",
		"/usr/bin/kubectl-crust",
		"/usr/lib/systemd/system/crust-proxy.service",
		"/usr/lib/systemd/system/crust-proxy-runtime.socket",
		"/usr/lib/systemd/system/crust-proxy-admin.socket",
		"/usr/share/crust-proxy/crust-runc.conf",
		"/usr/share/crust-proxy/cluster.conf",
		"/usr/share/crust-proxy/scan.conf",
		"/usr/share/crust-proxy/deploy/monitoring/alerts.yaml",
		"/usr/share/crust-proxy/deploy/helm/crust-proxy/templates/rbac.yaml",
		"/usr/share/crust-proxy/proto/crust/runtime/v1/runtime.proto",
		"/usr/share/bash-completion/completions/crustctl",
		"/usr/share/fish/vendor_completions.d/crustctl.fish",
		"/usr/share/doc/crust-proxy/README.md",
		"/usr/share/doc/crust-proxy/config.yaml",
		"/usr/share/man/man5/crust-proxy.yaml.5.gz",
		"/usr/share/man/man8/crust-proxy.8.gz",
		"/usr/share/man/man8/crustctl.8.gz",
	},
	"crust-runtimes": {
		"/usr/bin/crust-runc",
		"/usr/bin/crust-runc-agent",
		"/usr/bin/crust-vm",
		"/usr/bin/crust-vm-agent",
		"/usr/bin/crust-conformance",
		"/usr/share/man/man1/crust-conformance.1.gz",
		"/usr/share/man/man8/crust-runc-agent.8.gz",
		"/usr/share/man/man8/crust-runc.8.gz",
		"/usr/share/man/man8/crust-vm.8.gz",
	},
	"crust-backup": {
		"/usr/bin/crust-backup",
		"/usr/share/bash-completion/completions/crust-backup",
		"/usr/share/fish/vendor_completions.d/crust-backup.fish",
		"/usr/share/man/man1/crust-backup.1.gz",
	},
}

func TestPackages(t *testing.T) {
	rig.Need(t, "dpkg", "dpkg-deb", "rpm")
	extracted := t.TempDir()
	for _, name := range names {
		deb := rig.Package(t, name, "deb")
		size, err := strconv.Atoi(strings.TrimSpace(run(t, "dpkg-deb", "--field", deb, "Installed-Size")))
		check.That(t, err == nil && size <= 40_000, "%s takes %d KB when it is installed, more than 40 MB: %v", name, size, err)
		run(t, "dpkg-deb", "--extract", deb, extracted)
		t.Run(name+".rpm", func(t *testing.T) { testRPM(t, name, rig.Package(t, name, "rpm")) })
	}
	t.Run("man pages", func(t *testing.T) { testManPages(t, extracted) })
	t.Run("licences", func(t *testing.T) { testLicences(t, extracted) })
	t.Run("links", func(t *testing.T) { testLinks(t, extracted) })
	t.Run("deb", testDeb)
}

// testLicences compares the notice with what the installed programs say that they contain.
func testLicences(t *testing.T, dir string) {
	notice := check.Value(os.ReadFile(dir + "/usr/share/doc/crust-proxy/NOTICE"))(t)
	linked := 0
	for line := range strings.Lines(run(t, "go", "version", "-m", dir+"/usr/bin")) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "dep" {
			continue
		}
		linked++
		check.That(t, strings.Contains(string(notice), "\n"+fields[1]+" "+fields[2]+"\n"), "the licence of %s %s is missing", fields[1], fields[2])
	}
	check.That(t, linked != 0, "the programs say of no module")
}

// testLinks follows the links of the installed pages: to what is installed, or to files of this repository on the web.
func testLinks(t *testing.T, dir string) {
	const web = "https://github.com/crust-proxy/crust-proxy/blob/main/"
	pages := lines(run(t, "find", dir+"/usr/share/doc/crust-proxy/", "-name", "*.md"))
	count := 0
	for _, page := range pages {
		text := check.Value(os.ReadFile(page))(t)
		for _, link := range regexp.MustCompile(`\]\(([^)#\s]+)`).FindAllStringSubmatch(string(text), -1) {
			target := filepath.Join(filepath.Dir(page), link[1])
			if path, is := strings.CutPrefix(link[1], web); is {
				target = filepath.Join(repository(t), path)
			} else if strings.Contains(link[1], ":") {
				continue
			}
			count++
			check.That(t, check.Err(os.Stat(target)) == nil, "%s: the link %s leads to nothing", page, link[1])
		}
	}
	check.That(t, len(pages) >= 15 && count >= 100, "%d pages have %d links", len(pages), count)
}

// installAll installs the packages on this machine.
func installAll(t *testing.T) {
	t.Helper()
	args := []string{"-i"}
	for _, name := range names {
		args = append(args, rig.Package(t, name, "deb"))
	}
	run(t, "dpkg", args...)
}

func testDeb(t *testing.T) {
	deb := rig.Package(t, name, "deb")
	if remains := leftovers(t); len(remains) > 0 {
		rig.Missing(t, "crust-proxy is on this machine already, and the test would replace it: "+strings.Join(remains, " "))
	}
	t.Cleanup(func() { purge(t) })

	// blkid is in util-linux, which is essential.
	check.Equal(t, strings.TrimSpace(run(t, "dpkg-deb", "--field", deb, "Recommends")), "e2fsprogs, xfsprogs, btrfs-progs", "the .deb recommends")
	installAll(t)
	for _, name := range names {
		files := lines(run(t, "dpkg-query", "--listfiles", name))
		for _, path := range wanted[name] {
			check.That(t, slices.Contains(files, path), "the .deb of %s brought no %s", name, path)
		}
		checkModes(t, files)
	}
	checkInstalled(t)

	t.Run("an edited config survives removal and a new install", func(t *testing.T) { testReinstall(t, deb) })

	run(t, "dpkg", append([]string{"--remove"}, names...)...)
	left := leftovers(t)
	check.That(t, slices.Equal(left, []string{filepath.Dir(config), config}), "removal left %q, want only the config", left)
	run(t, "dpkg", append([]string{"--purge"}, names...)...)
	left = leftovers(t)
	check.That(t, len(left) == 0, "purge left %q", left)
}

// checkInstalled runs the programs from where the package put them.
func checkInstalled(t *testing.T) {
	t.Helper()
	run(t, "/usr/bin/crust-proxy", "validate", "--config", config)
	run(t, "/usr/bin/crust-proxy", "--help")
	run(t, "/usr/bin/crust-conformance", "--help")
	run(t, "/usr/bin/crust-vm", "crust", "removable")
	for _, program := range []string{"crust-proxy", "crustctl", "crust-backup", "crust-runc-agent", "crust-vm", "crust-conformance"} {
		said := run(t, "/usr/bin/"+program, "--version")
		check.That(t, strings.HasPrefix(said, program+" version v") || strings.HasPrefix(said, program+" version (devel)"),
			"%s --version says %q", program, said)
	}
	for _, program := range []string{"crustctl", "crust-backup"} {
		run(t, "bash", "-c", "source /usr/share/bash-completion/completions/"+program+" && complete -p "+program)
	}
	// The programs are there now, so systemd's own view of the units can be asked.
	said := run(t, "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", "crust-proxy.service")
	check.That(t, !strings.Contains(said, name), "systemd-analyze verify says:\n%s", said)
}

func testReinstall(t *testing.T, deb string) {
	const note = "# a word of the operator\n"
	edited := append(slices.Clone(check.Value(os.ReadFile(config))(t)), note...)
	check.Must(t, os.WriteFile(config, edited, 0o644))
	run(t, "dpkg", "--remove", name)
	run(t, "dpkg", "-i", deb)
	run(t, "dpkg", "-i", deb) // as an upgrade
	after := check.Value(os.ReadFile(config))(t)
	check.That(t, string(after) == string(edited), "the operator's edit of %s is gone", config)
	check.Is(t, check.Err(os.Lstat("/run/crust-proxy.reinstalled")), fs.ErrNotExist) // the mark between the install scripts
}

func testRPM(t *testing.T, name, rpm string) {
	files := lines(run(t, "rpm", "-qlp", rpm))
	for _, path := range append(wanted[name], "/usr/share/licenses/"+name+"/LICENSE", "/usr/share/doc/"+name+"/NOTICE") {
		check.That(t, slices.Contains(files, path), "the .rpm has no %s", path)
	}
	check.Equal(t, strings.TrimSpace(run(t, "rpm", "-qp", "--queryformat", "%{NAME} %{LICENSE}", rpm)), name+" Apache-2.0", "the .rpm calls itself")
	run(t, "rpm", "-K", "--nosignature", rpm)
	if name != "crust-proxy" {
		return
	}
	configs := lines(run(t, "rpm", "-qcp", rpm))
	check.That(t, slices.Equal(configs, []string{config}), "config files of the .rpm: %q", configs)
	recommends := lines(run(t, "rpm", "-qp", "--recommends", rpm))
	check.That(t, slices.Equal(recommends, []string{"util-linux", "e2fsprogs", "xfsprogs", "btrfs-progs"}), "the .rpm recommends %q", recommends)
	scripts := run(t, "rpm", "-qp", "--scripts", rpm)
	check.Says(t, "the .rpm", scripts, "preinstall scriptlet", "postinstall scriptlet", "preuninstall scriptlet", "postuninstall scriptlet")
}

// checkModes wants nothing that others can write, nothing set-uid, all of root.
func checkModes(t *testing.T, files []string) {
	t.Helper()
	for _, path := range files {
		info, err := os.Lstat(path)
		if err != nil {
			t.Errorf("the package lists what is not there: %v", err)
			continue
		}
		check.That(t, (info.Mode()&fs.ModeSymlink != 0 || info.Mode().Perm()&0o022 == 0) && info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) == 0,
			"%s has mode %v", path, info.Mode())
	}
}

// leftovers is what of the package is on this machine.
func leftovers(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, pattern := range []string{
		"/etc/crust-proxy*", "/etc/crust-proxy/*",
		"/etc/systemd/system/*/crust-proxy*", "/etc/systemd/system/crust-proxy*",
		"/run/crust-proxy*",
		"/lib/systemd/system/crust-proxy*",
		"/usr/bin/crust-proxy", "/usr/bin/crustctl", "/usr/bin/kubectl-crust", "/usr/bin/crust-backup", "/usr/bin/crust-runc*", "/usr/bin/crust-vm*", "/usr/bin/crust-conformance",
		"/usr/share/doc/crust-*", "/usr/share/crust-*",
		"/usr/share/*/*/*crustctl*", "/usr/share/zsh/*/*crustctl*", "/usr/share/*/*/*crust-backup*", "/usr/share/zsh/*/*crust-backup*", "/usr/share/man/man*/*crust*",
		"/var/lib/systemd/*/crust-proxy*", "/var/lib/crust-proxy",
	} {
		found = append(found, check.Value(filepath.Glob(pattern))(t)...)
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// purge leaves the machine as it was, whatever the test did.
func purge(t *testing.T) {
	t.Helper()
	for _, name := range names {
		if err := exec.Command("dpkg-query", "--status", name).Run(); err != nil {
			continue // dpkg knows no such package
		}
		out, err := exec.Command("dpkg", "--purge", "--force-remove-reinstreq", name).CombinedOutput()
		check.That(t, err == nil, "clean up: dpkg --purge: %v\n%s", err, out)
	}
}

func repository(t *testing.T) string {
	t.Helper()
	return check.Value(filepath.Abs("../.."))(t)
}

func run(t *testing.T, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return check.Run(t, cmd)
}

func lines(text string) []string {
	return strings.Split(strings.TrimSpace(text), "\n")
}

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
		check.That(t, err == nil && complaints.Len() == 0 && strings.Contains(string(page), "\nNAME\n       "+name+" "),
			"%s: %v, %s\n%s", name, err, complaints.String(), page)
		check.Says(t, "whatis", run(t, "lexgrog", found[0]), `"`+name+" - ")
	}
}
