package cluster

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

const (
	mostFile    = 4 << 20      // of one file, which is cut at the end of a line
	mostArchive = 256 << 20    // of all files, before they are compressed
	mostList    = 2 * mostFile // of the list of what is not included, for which room is kept
	logLines    = 2000
)

// archive is a support archive, of bounded size.
type archive struct {
	t    *tool
	k    *api // nil without an API server
	tar  *tar.Writer
	left int
	skip []string // what is not in it, and why
	err  error
}

type file struct {
	name string
	raw  []byte
}

// part is what is read for an archive. Whatever is added is redacted, and files are bounded.
type part struct {
	files []file
	skip  []string
}

func (p *part) add(name string, raw []byte) {
	if len(raw) > mostFile {
		p.skip = append(p.skip, fmt.Sprintf("%s: the end of %d bytes is cut off", name, len(raw)))
		raw = append(raw[:max(0, bytes.LastIndexByte(raw[:mostFile], '\n')):mostFile], "\n... cut off\n"...)
		name += show.When(strings.HasSuffix(name, ".json"), ".part") // it is no JSON any more
	}
	p.files = append(p.files, file{name, redact(raw)})
}

func (a *archive) write(p part) {
	a.skip = append(a.skip, p.skip...)
	for _, f := range p.files {
		if len(f.raw) > a.left {
			a.skip = append(a.skip, f.name+": the archive is full")
			continue
		}
		a.left -= len(f.raw)
		header := a.tar.WriteHeader(&tar.Header{Name: path.Join("crust-bundle", f.name), Mode: 0o600, Size: int64(len(f.raw)), ModTime: time.Now()})
		_, content := a.tar.Write(f.raw)
		a.err = cmp.Or(a.err, header, content)
	}
}

// try adds what was read, or notes why it could not be.
func (p *part) try(name string, raw []byte, err error) {
	if err != nil {
		p.skip = append(p.skip, name+": "+err.Error())
		return
	}
	p.add(name, raw)
}

// json adds a value that was read, or notes the error. It redacts the texts in a value, not its encoding, in which a secret may have another form.
func (p *part) json(name string, value any, err error) {
	var plain any
	raw, failure := json.Marshal(value)
	if err = cmp.Or(err, failure); err == nil {
		err = json.Unmarshal(raw, &plain)
	}
	if err == nil {
		plain = printer.MapTexts(plain, func(text string) string { return string(redact([]byte(text))) })
		raw, err = json.MarshalIndent(plain, "", " ")
	}
	p.try(name, raw, err)
}

// writeBundle writes an archive of nodes to a new file, readable by its owner only, and says what is in it.
func writeBundle(ctx context.Context, t *tool, k *api, states []*state, name string) error {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // #nosec G304 -- the operator names it
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(file)
	a := &archive{t: t, k: k, tar: tar.NewWriter(zip), left: mostArchive - mostList}
	a.fill(ctx, states)
	if err = cmp.Or(a.err, a.tar.Close(), zip.Close(), file.Close()); err != nil {
		_ = os.Remove(name)
		return err
	}
	err = t.out.Result(map[string]any{"file": name, "nodes": len(states), "notIncluded": append([]string{}, a.skip...)}, func() error {
		return t.out.Line(fmt.Sprintf("%s: %s, %s could not be read or are cut off (not-included.txt).\nSecrets are removed as far as they can be recognized; "+
			"names of pods, volumes and nodes are in it: look before you send it.", name, show.Count(len(states), "node"), show.Count(len(a.skip), "thing")))
	})
	return verdict(err, states)
}

// fill adds first what is small and matters most, then as much of the nodes as there is room for, and at last the
// list of what is missing.
func (a *archive) fill(ctx context.Context, states []*state) {
	a.write(a.check(ctx, states))
	a.write(a.config(ctx, states))
	a.nodes(ctx, states)
	a.left += mostList
	var list part
	list.add("not-included.txt", []byte(strings.Join(a.skip, "\n")+"\n"))
	a.write(list)
}

func (a *archive) check(ctx context.Context, states []*state) (p part) {
	var text bytes.Buffer
	plain := &tool{out: &printer.Printer{Out: &text, Format: printer.FormatTable}, now: a.t.now}
	_ = printAll(plain.out, checkAll(ctx, &a.t.access, a.k, states)) // what fails is in the text
	text.WriteString("\n")
	_ = plain.printNodes(states)
	p.add("check.txt", text.Bytes())
	p.add("version.txt", []byte("kubectl crust "+sys.Version()+"\n"))
	return p
}

// nodes reads some nodes at a time, so that a few without an answer do not hold up all, and adds them in order.
func (a *archive) nodes(ctx context.Context, states []*state) {
	for some := range slices.Chunk(states, askedAtOnce) {
		parts := make([]part, len(some))
		sys.Each(askedAtOnce, slices.All(some), func(i int, s *state) { parts[i] = a.node(ctx, s) })
		for _, p := range parts {
			a.write(p)
		}
	}
}

// node adds what the daemon shows, and if it is a pod, its state, events and log.
func (a *archive) node(ctx context.Context, s *state) (p part) {
	dir := path.Join("nodes", strings.ReplaceAll(cmp.Or(s.node, "unknown"), "/", "_"))
	p.json(dir+"/node.json", s.document(), nil)
	p.json(dir+"/volumes.json", map[string]any{"volumes": printer.Objects(s.volumes)}, s.err)
	if s.err == nil { // one that did not answer is not waited for again
		for _, name := range []string{"metrics", "readyz"} {
			ctx, cancel := context.WithTimeout(ctx, a.t.patience)
			raw, err := s.get(ctx, "/"+name)
			cancel()
			p.try(dir+"/"+name+".txt", raw, err)
		}
	}
	if s.pod == nil {
		p.skip = append(p.skip, dir+"/log.txt: the daemon is no pod; on the node: journalctl -u crust-proxy, crustctl doctor")
		return p
	}
	p.json(dir+"/pod.json", s.pod, nil) // only the fields that we know of: no environment
	base := "/api/v1/namespaces/" + url.PathEscape(s.pod.Metadata.Namespace)
	events, err := list[event](ctx, a.k, base+"/events", url.Values{"fieldSelector": {"involvedObject.name=" + s.pod.Metadata.Name}})
	p.json(dir+"/events.json", events, err)
	for name, query := range map[string]string{"log.txt": "", "log-previous.txt": "&previous=true"} {
		// limitBytes would cut off the newest lines. Before a cut a secret may begin.
		raw, err := a.k.raw(ctx, fmt.Sprintf("%s/pods/%s/log?tailLines=%d%s", base, url.PathEscape(s.pod.Metadata.Name), logLines, query))
		if raw = redact(raw); len(raw) > mostFile {
			p.skip = append(p.skip, fmt.Sprintf("%s/%s: the beginning of %d bytes is cut off", dir, name, len(raw)))
			raw = raw[len(raw)-mostFile:]
			raw = raw[bytes.IndexByte(raw, '\n')+1:]
		}
		p.try(dir+"/"+name, raw, err)
	}
	return p
}

// config adds the ConfigMaps that the daemons' pods mount.
func (a *archive) config(ctx context.Context, states []*state) (p part) {
	seen := map[string]bool{}
	for _, s := range states {
		if s.pod == nil {
			continue
		}
		for _, v := range s.pod.Spec.Volumes {
			name := s.pod.Metadata.Namespace + "/configmaps/" + v.ConfigMap.Name
			if v.ConfigMap.Name == "" || seen[name] {
				continue
			}
			seen[name] = true
			var config struct{ Data map[string]string }
			if err := a.k.get(ctx, "/api/v1/namespaces/"+name, &config); err != nil {
				p.skip = append(p.skip, "config/"+name+": "+err.Error())
			}
			for key, text := range config.Data {
				p.add("config/"+v.ConfigMap.Name+"/"+key, []byte(text))
			}
		}
	}
	return p
}

const (
	removed    = "[REMOVED]"
	secretName = `(?i)((?:passw(?:or)?d|pwd|passphrase|secret|token|credential|key|auth|chap)[\w.-]*\\*["']?\s*` // #nosec G101 -- a pattern
)

var (
	// secretWords are in every line with a secret that is recognized: patterns are slow.
	secretWords = []string{"passw", "pwd", "passphrase", "auth", "secret", "token", "credential", "key", "chap", "eyj", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "xox", "github_pat_", "glpat-", "sig=", "signature=", "bearer", "basic", "://"}
	// secretForms find tokens, keys, credentials in URLs, and values after a telling name, in YAML, JSON, mount options
	// or a log, or after a flag; what follows an unquoted colon goes to the end of its line.
	secretForms = []*regexp.Regexp{
		regexp.MustCompile(`()-----BEGIN [A-Z ]*PRIVATE KEY-----.*`),
		regexp.MustCompile(`(\\[nrt]|\b)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*`),
		regexp.MustCompile(`(\\[nrt]|\b)(?:(?:AKIA|ASIA)[A-Z0-9]{16}\b|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{10,}|xox[abprs]-[\w-]{10,})`),
		regexp.MustCompile(`(?i)(\\[nrt]|\b)(?:bearer|basic)\s+[\w.~+/=-]{8,}`),
		regexp.MustCompile(`(?i)((?:\bsig|-signature)=)[^&\s"'\\]+`), // of signed URLs
		regexp.MustCompile(`([a-z][a-z0-9+.-]*://)[^/\s:@"']*:[^/\s@"']+@`),
		regexp.MustCompile(secretName + `[:=]\s*")(?:[^"\\]|\\.)*`),
		regexp.MustCompile(secretName + `[:=]\s*\\+["']).*`), // a string in a string: its end cannot be told
		regexp.MustCompile(secretName + `:\s*(?:[|>][-+0-9]*)?\\+n).*`),
		regexp.MustCompile(secretName + `[:=]\s*')[^'\n]*`),
		regexp.MustCompile(secretName + `:[ \t]*)[^\s"'\\].*`),
		regexp.MustCompile(secretName + `=\s*)[^\s,;&"'\\][^\s,;&]*`),
		regexp.MustCompile(strings.Replace(secretName, "(?:", `--[\w.-]*(?:`, 1) + `[\s,]\s*\\*)(?:"[^"]*|'[^']*|[^\s"']\S*)`),
	}
	// secretBlock begins a block or list of YAML, which ends at the next line that is not deeper.
	secretBlock = regexp.MustCompile(secretName + `:)`)
)

// indentation is that of what a line has, after the marks of list items.
func indentation(line []byte) int {
	rest := bytes.TrimLeft(line, " \t")
	for bytes.HasPrefix(rest, []byte("- ")) {
		rest = bytes.TrimLeft(rest[2:], " \t")
	}
	return len(line) - len(rest)
}

// beginsKey reports whether the lines that follow are a private key's.
func beginsKey(lower []byte) bool {
	return bytes.Contains(lower, []byte("private key-----")) && !bytes.Contains(lower, []byte("-----end"))
}

func redact(raw []byte) []byte {
	out := make([]byte, 0, len(raw))
	key, block := false, -1 // within a private key; the indentation of a block's name
	for line := range bytes.Lines(raw) {
		indent := indentation(line)
		switch lower := bytes.ToLower(line); {
		case key:
			key = !bytes.Contains(lower, []byte("-----end"))
			continue
		case block >= 0 && (indent > block || len(bytes.TrimSpace(line)) == 0):
			key = beginsKey(lower)
			continue
		case slices.ContainsFunc(secretWords, func(word string) bool { return bytes.Contains(lower, []byte(word)) }):
			key = beginsKey(lower)
			if block = -1; secretBlock.Match(line) {
				block = indent
			}
			for _, form := range secretForms {
				line = form.ReplaceAll(line, []byte("${1}"+removed))
			}
		default:
			block = -1
		}
		out = append(out, line...)
	}
	return out
}
