// Command object-health reads a JSON list of objects from standard input and prints what others make of each:
// kstatus, as Helm and Flux wait for it, and the Lua script of -script, as Argo CD runs it.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"os"

	flux "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type health struct {
	Kstatus string            `json:"kstatus"` // of sigs.k8s.io
	Flux    string            `json:"flux"`    // of its fork, which Flux and Helm 4 use
	Message string            `json:"message"`
	Argo    map[string]string `json:"argo"` // what the script returns
}

func read(object map[string]any, script string) (health, error) {
	manifest := &unstructured.Unstructured{Object: object}
	computed, err := status.Compute(manifest)
	if err != nil {
		return health{}, err
	}
	forked, err := flux.Compute(manifest)
	if err != nil {
		return health{}, err
	}
	argo, err := argoHealth(object, script)
	return health{computed.Status.String(), forked.Status.String(), computed.Message, argo}, err
}

// argoHealth runs a script as Argo CD does: the object is the global obj, and base is the only library.
func argoHealth(object map[string]any, script string) (map[string]string, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	lua.OpenBase(state)
	state.SetGlobal("obj", toLua(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	result := map[string]string{}
	if table, ok := state.Get(-1).(*lua.LTable); ok {
		table.ForEach(func(key, value lua.LValue) { result[key.String()] = value.String() })
	}
	return result, nil
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case bool:
		return lua.LBool(value)
	case float64:
		return lua.LNumber(value)
	case int64:
		return lua.LNumber(value)
	case string:
		return lua.LString(value)
	case []any:
		table := state.NewTable()
		for _, each := range value {
			table.Append(toLua(state, each))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, each := range value {
			table.RawSetString(key, toLua(state, each))
		}
		return table
	}
	return lua.LNil
}

func run() error {
	path := flag.String("script", "", "Lua script of Argo CD")
	flag.Parse()
	script, err := os.ReadFile(*path)
	if err != nil {
		return err
	}
	list := &unstructured.UnstructuredList{}
	if err := json.NewDecoder(os.Stdin).Decode(list); err != nil {
		return err
	}
	results := []health{}
	for _, item := range list.Items {
		result, err := read(item.Object, string(script))
		if err != nil {
			return err
		}
		results = append(results, result)
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
