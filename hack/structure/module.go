package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const modulePath = "github.com/crust-proxy/crust-proxy/"

// module is the code of this module without generated files; its types are those outside of tests.
type module struct {
	lines  map[string]int       // by part: product, reference, tests
	dirs   map[string]int       // by package directory, without tests
	types  map[string]*typeInfo // by directory and name: "pkg/deferral.Broker"
	files  []sourceFile
	embeds []embed
}

type typeInfo struct {
	methods int
	files   map[string]bool
	fields  bool // it is a struct
}

type sourceFile struct {
	name, text string
	imports    []string
}

// embed is a struct that embeds another, or a pointer to it.
type embed struct {
	at, in, target string
	pointer        bool
}

func readModule(root string) (*module, error) {
	m := &module{lines: make(map[string]int), dirs: make(map[string]int), types: make(map[string]*typeInfo)}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if base := entry.Name(); name != root && (base[0] == '.' || base == "testdata" || base == "bin" || base == "dist") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, ".pb.go") {
			return nil
		}
		raw, err := os.ReadFile(name) //nolint:gosec // below the checkout
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		lines := strings.Count(string(raw), "\n")
		m.lines[partOf(name)] += lines
		if strings.HasSuffix(name, "_test.go") {
			return nil
		}
		m.dirs[path.Dir(name)] += lines
		return m.add(name, raw)
	})
	return m, err
}

// partOf is the part of the repository to which a file counts.
func partOf(name string) string {
	top, _, _ := strings.Cut(name, "/")
	switch {
	case isTest(name), strings.HasSuffix(name, "_test.go"), strings.HasPrefix(name, "pkg/runtime/runtimetest/"), top == "hack":
		return "tests"
	case top == "reference", top == "examples":
		return "reference"
	}
	return "product"
}

func (m *module) add(name string, raw []byte) error {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, raw, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	dir := path.Dir(name)
	source := sourceFile{name: name, text: string(raw)}
	imports := make(map[string]string)
	for _, spec := range file.Imports {
		from, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		source.imports = append(source.imports, from)
		imports[path.Base(from)] = from
		if spec.Name != nil {
			imports[spec.Name.Name] = from
		}
	}
	m.files = append(m.files, source)
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			m.addMethod(dir, name, decl)
		case *ast.GenDecl:
			m.addTypes(fset, dir, imports, decl)
		}
	}
	return nil
}

func (m *module) info(key string) *typeInfo {
	if m.types[key] == nil {
		m.types[key] = &typeInfo{files: make(map[string]bool)}
	}
	return m.types[key]
}

func (m *module) addMethod(dir, name string, decl *ast.FuncDecl) {
	if decl.Recv == nil {
		return
	}
	t := decl.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if generic, ok := t.(*ast.IndexExpr); ok {
		t = generic.X
	}
	if ident, ok := t.(*ast.Ident); ok {
		info := m.info(dir + "." + ident.Name)
		info.methods++
		info.files[name] = true
	}
}

func (m *module) addTypes(fset *token.FileSet, dir string, imports map[string]string, decl *ast.GenDecl) {
	for _, spec := range decl.Specs {
		named, ok := spec.(*ast.TypeSpec)
		if !ok {
			continue
		}
		fields, ok := named.Type.(*ast.StructType)
		if !ok {
			continue
		}
		m.info(dir + "." + named.Name.Name).fields = true
		for _, field := range fields.Fields.List {
			if len(field.Names) > 0 {
				continue
			}
			e := embed{at: fset.Position(field.Pos()).String(), in: named.Name.Name}
			expr := field.Type
			if star, ok := expr.(*ast.StarExpr); ok {
				e.pointer, expr = true, star.X
			}
			switch t := expr.(type) {
			case *ast.Ident:
				e.target = dir + "." + t.Name
			case *ast.SelectorExpr:
				if pkg, ok := t.X.(*ast.Ident); ok {
					e.target = strings.TrimPrefix(imports[pkg.Name], modulePath) + "." + t.Sel.Name
				}
			}
			m.embeds = append(m.embeds, e)
		}
	}
}

// embedded lists the structs that embed a pointer to a struct of this module that has methods, because a reader cannot
// tell where a method comes from, and the structs that more than two others embed: each of those names what it uses.
func (m *module) embedded() []string {
	var found []string
	shared := make(map[string][]string)
	for _, e := range m.embeds {
		t := m.types[e.target]
		switch {
		case t == nil || !t.fields || strings.HasPrefix(e.target, "proto/") || isTest(e.at):
		case !e.pointer:
			shared[e.target] = append(shared[e.target], e.in)
		case t.methods > 0:
			found = append(found, fmt.Sprintf("%s: %s embeds *%s, which has methods: use a named field", e.at, e.in, e.target))
		}
	}
	for target, in := range shared {
		if len(in) > mostEmbedding {
			found = append(found, fmt.Sprintf("%s is embedded in %s: each names what it uses", target, strings.Join(in, ", ")))
		}
	}
	slices.Sort(found)
	return found
}

func isTest(name string) bool { return strings.HasPrefix(name, "test/") }

var foreign = regexp.MustCompile(`(?i)\b(csi|kubelet|pods?)\b`)

// tag is the name of a field in a file, which cannot be changed.
var tag = regexp.MustCompile("`json:.*`")

// words lists what the core knows and should not.
func (m *module) words() []string {
	var found []string
	for _, file := range m.files {
		if !strings.HasPrefix(file.name, "pkg/deferral/") && !strings.HasPrefix(file.name, "pkg/volume/") {
			continue
		}
		for number, line := range strings.Split(file.text, "\n") {
			if word := foreign.FindString(tag.ReplaceAllString(line, "")); word != "" {
				found = append(found, fmt.Sprintf("%s:%d says %q: the core knows no CSI, kubelet or pods", file.name, number+1, word))
			}
		}
		for _, from := range file.imports {
			if path.Dir(file.name) == "pkg/volume" && strings.Contains(from, ".") {
				found = append(found, fmt.Sprintf("%s imports %s: pkg/volume may import only the standard library", file.name, from))
			}
		}
	}
	slices.Sort(found)
	return found
}
