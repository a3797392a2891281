//go:build system

package package_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestUpgradeFromOnePackage: all programs were in crust-proxy once. While pods run by crust-runc, no
// upgrade takes it from them: dpkg's is refused, and rpm's leaves it. crust-runtimes takes it over.
func TestUpgradeFromOnePackage(t *testing.T) {
	m := boot(t)
	for format, tool := range map[string]struct {
		program       []string
		owner, remove string
	}{
		"deb": {[]string{"dpkg", "-i"}, "dpkg-query --search", "dpkg --purge"},
		"rpm": {[]string{"rpm", "--force-debian", "--nodeps", "-U"}, "rpm --queryformat %{NAME}: -qf", "rpm --force-debian --nodeps -e"},
	} {
		upgrade := func(packages ...string) (string, error) {
			out, err := m.command(tool.program[0], append(tool.program[1:], packages...)...).CombinedOutput()
			return string(out), err
		}
		next := func(name string) string { return m.bring(rig.Package(t, name, format)) }
		if said, err := upgrade(m.bring(onePackage(t, format))); err != nil {
			t.Fatal(err, said)
		}
		m.run("touch", "/run/a-pod-runs")
		if said, err := upgrade(next(name)); !strings.Contains(said, "in the package crust-runtimes now") || (err != nil) != (format == "deb") {
			t.Errorf("%s: an upgrade under a pod: %v\n%s", format, err, said)
		}
		if said := m.run("crust-runc", "crust", "version"); said != "one package" {
			t.Errorf("%s: after it crust-runc is %q", format, said)
		}
		if format == "rpm" {
			m.run("rpm", "--force-debian", "--nodeps", "-U", "--oldpackage", m.bring(onePackage(t, format)))
		}
		if said, err := upgrade(next("crust-runtimes"), next("crust-backup"), next(name)); err != nil {
			t.Errorf("%s: %v\n%s", format, err, said)
		}
		for program, owner := range map[string]string{"crustctl": name, "crust-backup": "crust-backup", "crust-runc": "crust-runtimes"} {
			got := m.run("sh", "-c", tool.owner+" /usr/bin/"+program)
			check.That(t, strings.HasPrefix(got, owner+":"), "%s: %s is of %q", format, program, got)
		}
		m.run("crustctl", "version", "--client")
		left := m.run("sh", "-c", "crust-runc crust removable && find /usr/bin -name '*.kept'")
		check.That(t, left == "", "%s left %s", format, left)
		m.run("rm", "/run/a-pod-runs")
		m.run("sh", "-c", tool.remove+" "+strings.Join(names, " "))
	}
}

// onePackage builds a crust-proxy of the time before there were others.
func onePackage(t *testing.T, format string) string {
	t.Helper()
	dir := t.TempDir()
	const runtime = "#!/bin/sh\n[ $2 != version ] || echo one package\n[ $2 != removable ] || [ ! -e /run/a-pod-runs ]\n"
	tree := filepath.Join(dir, "tree/usr/bin")
	check.Must(t, os.MkdirAll(tree, 0o755))
	for _, program := range []string{"crust-proxy", "crustctl", "crust-backup", "crust-runc", "crust-vm"} {
		check.Must(t, os.WriteFile(filepath.Join(tree, program), []byte(runtime), 0o755))
	}
	text := "name: crust-proxy\narch: amd64\nversion: 0.0.0-dev.20261101000000\nmaintainer: nobody <nobody@crust-proxy.invalid>\ndescription: all in one\n" +
		"contents: [{src: " + dir + "/tree, dst: /, type: tree}]\n"
	check.Must(t, os.WriteFile(filepath.Join(dir, "nfpm.yaml"), []byte(text), 0o600))
	run(t, "go", "tool", "-modfile="+repository(t)+"/tools/nfpm/go.mod", "nfpm", "package", "--config", dir+"/nfpm.yaml", "--packager", format, "--target", dir)
	paths, err := filepath.Glob(dir + "/*." + format)
	check.That(t, err == nil && len(paths) == 1, "the packages are %q, %v", paths, err)
	return paths[0]
}
